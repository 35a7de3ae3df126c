"""A sheet of drawings of icons: a row for each subject, a column for each style.

A cell is the best drawing of its caption. Cells of held-out combinations are framed: the model has not seen the subject
in that style. A cell is empty if the data has no picture of the combination, and so no caption.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from limner.errors import UserError, suggestion
from limner.evaluation.generate_batches import drawn
from limner.evaluation.icon_pictures import Icons
from limner.evaluation.report import wrap
from limner.pipeline import TextToImage
from limner.progress import Advance
from limner.sampling.rerank import best

FRAME, SIDE, GAP, LEFT, TOP = "#d97706", 96, 12, 120, 34  # least pixels of a picture, between, left and above all
_ROWS = 8  # where no subject is named

Cells = dict[tuple[str, str], int]  # (subject, style) -> index of the real picture in the gallery


def cells(icons: Icons, subjects: Sequence[str] = ()) -> Cells:
    """The cells of these subjects, in the order given; by default of some with a held-out combination.

    Raises `UserError` for a subject that the data does not have.
    """
    of: dict[str, dict[str, int]] = {}
    for i, (subject, style) in enumerate(zip(icons.gallery.keys, icons.styles, strict=True)):
        of.setdefault(subject, {}).setdefault(style, i)
    subjects = subjects or (_by_turns(icons, of) or list(of))[:_ROWS]
    for subject in subjects:
        if subject not in of:
            raise UserError(f"the data has no subject {subject!r}: {suggestion(subject, of)}")
    return {(subject, style): of[subject][style] for subject in subjects for style in sorted(of[subject])}


def _by_turns(icons: Icons, of: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Subjects with a held-out combination: one of each style in turn, first those with the most styles."""
    waiting: dict[str, list[str]] = {}
    gallery = icons.gallery
    for i in gallery.choose("combination"):
        if gallery.keys[i] == gallery.families[i]:  # of its skin tones one will do
            waiting.setdefault(icons.styles[i], []).append(gallery.keys[i])
    rows = (sorted(subjects, key=lambda subject: -len(of[subject])) for subjects in waiting.values())
    return [subject for turn in zip_longest(*rows) for subject in turn if subject]


def draw(
    pipe: TextToImage, icons: Icons, chosen: Cells, candidates: int, seed: int, progress: Advance | None = None
) -> Tensor:
    """The best of so many candidates for each cell, uint8 [B, 3, H, W]."""
    captions = [icons.gallery.captions[i] for i in chosen.values()]
    made = drawn(pipe, captions, candidates, seed, progress=progress)
    return torch.cat([m.pictures[torch.arange(len(part)), best(m.scores, 1)[:, 0]] for part, m in made])


def sheet(icons: Icons, chosen: Cells, drawings: Tensor, real: bool = False) -> Image.Image:
    """The sheet; with `real`, the real picture is at the right of each drawing."""
    gallery = icons.gallery
    subjects, styles = list(dict.fromkeys(s for s, _ in chosen)), sorted({style for _, style in chosen})
    factor = math.ceil(SIDE / drawings.shape[-1])
    side = factor * drawings.shape[-1]
    beside = side + GAP // 3  # from a drawing to the real picture
    width = (beside if real else 0) + side + GAP
    picture = Image.new("RGB", (LEFT + len(styles) * width + GAP, TOP + len(subjects) * (side + GAP) + 22), "white")
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(14)
    for column, style in enumerate(styles):
        pen.text((LEFT + column * width, 8), style, "black", font)
    for row, subject in enumerate(subjects):
        for line, text in enumerate(wrap(subject, font, LEFT - GAP)[:4]):
            pen.text((GAP, TOP + row * (side + GAP) + 17 * line), text, "black", font)
    for (subject, style), i, drawing in zip(chosen, chosen.values(), drawings, strict=True):
        x, y = LEFT + styles.index(style) * width, TOP + subjects.index(subject) * (side + GAP)
        if gallery.splits[i] != "train":
            pen.rectangle((x - 4, y - 4, x + width - GAP + 3, y + side + 3), outline=FRAME, width=3)
        for place, pixels in enumerate((drawing, gallery.pictures[i])[: 2 if real else 1]):
            image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
            picture.paste(image.resize((side, side), Image.Resampling.NEAREST), (x + place * beside, y))
    pen.text((LEFT, picture.height - 22), "framed: never seen in this style", FRAME, font)
    return picture
