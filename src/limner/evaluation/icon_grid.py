"""Grid of drawings of icons: a row for each subject, a column for each style.

A cell shows the best drawing of its caption. Cells of held-out combinations are framed: the model was not trained on
the subject in that style. A cell is empty if the data set lacks the combination.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from limner.errors import UserError, did_you_mean
from limner.evaluation.generate_batches import generate_batches
from limner.evaluation.icon_pictures import Icons
from limner.evaluation.report import wrap
from limner.pipeline import TextToImage
from limner.progress import Advance
from limner.sampling.rerank import best

FRAME, SIDE, GAP, LEFT, TOP = "#d97706", 96, 12, 120, 34  # color; in pixels: cell (minimum), gap, left and top margin
_DEFAULT_ROWS = 8

Cells = dict[tuple[str, str], int]  # (subject, style) -> index of the real picture in the reference set


def grid_cells(icons: Icons, subjects: Sequence[str] = ()) -> Cells:
    """Return the cells of the named subjects in that order, by default of subjects with a held-out combination.

    Raises `UserError` for a subject that the data set does not have.
    """
    pictures: dict[str, dict[str, int]] = {}
    for i, (subject, style) in enumerate(zip(icons.references.keys, icons.styles, strict=True)):
        pictures.setdefault(subject, {}).setdefault(style, i)
    subjects = subjects or (_round_robin(icons, pictures) or list(pictures))[:_DEFAULT_ROWS]
    for subject in subjects:
        if subject not in pictures:
            raise UserError(f"unknown subject {subject!r}: {did_you_mean(subject, pictures)}")
    return {(subject, style): pictures[subject][style] for subject in subjects for style in sorted(pictures[subject])}


def _round_robin(icons: Icons, pictures: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return the subjects with a held-out combination, round-robin over styles, those with the most styles first."""
    by_style: dict[str, list[str]] = {}
    references = icons.references
    for i in references.split_indices("combination"):
        if references.keys[i] == references.families[i]:  # one skin tone per subject
            by_style.setdefault(icons.styles[i], []).append(references.keys[i])
    rows = (sorted(subjects, key=lambda subject: -len(pictures[subject])) for subjects in by_style.values())
    return [subject for turn in zip_longest(*rows) for subject in turn if subject]


def generate(
    pipe: TextToImage, icons: Icons, cells: Cells, candidates: int, seed: int, progress: Advance | None = None
) -> Tensor:
    """Generate the best of `candidates` drawings for each cell, uint8 [B, 3, H, W]."""
    captions = [icons.references.captions[i] for i in cells.values()]
    batches = generate_batches(pipe, captions, candidates, seed, progress=progress)
    return torch.cat([b.pictures[torch.arange(len(part)), best(b.scores, 1)[:, 0]] for part, b in batches])


def render(icons: Icons, cells: Cells, drawings: Tensor, real: bool = False) -> Image.Image:
    """Render the grid; with `real`, the real picture is to the right of each drawing."""
    references = icons.references
    subjects, styles = list(dict.fromkeys(s for s, _ in cells)), sorted({style for _, style in cells})
    factor = math.ceil(SIDE / drawings.shape[-1])
    side = factor * drawings.shape[-1]
    offset = side + GAP // 3  # from a drawing to its real picture
    width = (offset if real else 0) + side + GAP
    grid = Image.new("RGB", (LEFT + len(styles) * width + GAP, TOP + len(subjects) * (side + GAP) + 22), "white")
    pen, font = ImageDraw.Draw(grid), ImageFont.load_default(14)
    for column, style in enumerate(styles):
        pen.text((LEFT + column * width, 8), style, "black", font)
    for row, subject in enumerate(subjects):
        for line, text in enumerate(wrap(subject, font, LEFT - GAP)[:4]):
            pen.text((GAP, TOP + row * (side + GAP) + 17 * line), text, "black", font)
    for (subject, style), i, drawing in zip(cells, cells.values(), drawings, strict=True):
        x, y = LEFT + styles.index(style) * width, TOP + subjects.index(subject) * (side + GAP)
        if references.splits[i] != "train":
            pen.rectangle((x - 4, y - 4, x + width - GAP + 3, y + side + 3), outline=FRAME, width=3)
        for column, pixels in enumerate((drawing, references.pictures[i])[: 2 if real else 1]):
            image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
            grid.paste(image.resize((side, side), Image.Resampling.NEAREST), (x + column * offset, y))
    pen.text((LEFT, grid.height - 22), "framed: held-out combination of subject and style", FRAME, font)
    return grid
