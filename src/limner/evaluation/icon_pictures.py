"""Pictures of a data set of icons for its evaluation: splits, held-out pairs, the copying baseline, and a grid.

The grid has a row for each subject and a column for each style. A cell shows the best drawing of its caption. Cells of
held-out combinations are framed: the model was not trained on the subject in that style. A cell is empty if the data
set lacks the combination.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from limner.data.datasets import ImageCaptionDataset
from limner.data.sample import Source
from limner.errors import UserError, did_you_mean
from limner.evaluation.generate_batches import generate_batches, to_image
from limner.evaluation.icon_classifier import LabeledIcons
from limner.evaluation.nearest_neighbor import ReferenceSet
from limner.evaluation.report import wrap
from limner.pipeline import TextToImage
from limner.progress import Advance
from limner.sampling.rerank import best

#: Splits and their titles in tables: training pictures, and the two reasons to hold a picture out.
SPLITS = {"combination": "held-out combinations", "subject": "held-out subjects", "train": "training captions"}
FRAME, SIDE, GAP, LEFT, TOP = "#d97706", 96, 12, 120, 34  # color; in pixels: cell (minimum), gap, left and top margin
_DEFAULT_ROWS = 8
_MAX_SHARED = 512  # subjects that measure the distance of two styles

Cells = dict[tuple[str, str], int]  # (subject, style) -> index of the real picture in the reference set


@dataclass(frozen=True)
class Icons:
    """Pictures of a data set of icons.

    Attributes:
        references: the M single pictures. A key is the subject, a family the subject without its skin tone, a split one
            of `SPLITS`.
        styles, sets: of the single pictures, [M].
        looks: what distinguishes the single pictures from variants of the same set, such as "filled", [M].
        pairs: the P held-out pairs. A split is the kind of the lower half: "style", "upside down", ...
        pair_styles: of the lower halves, [P].
    """

    references: ReferenceSet
    styles: list[str]
    sets: list[str]
    looks: list[str]
    pairs: ReferenceSet
    pair_styles: list[str]

    @staticmethod
    def from_source(source: Source, size: int) -> Icons:
        """Read a whole source at `size` pixels per side, without the samples that cannot be read.

        Raises `UserError` if no sample has a subject and a style.
        """
        indices, pictures, captions, _ = ImageCaptionDataset(source, size).load(np.arange(len(source)))
        meta = [source.meta(int(i)) for i in indices]
        icons = [i for i, m in enumerate(meta) if "subject" in m and "style" in m]
        single = [i for i in icons if "pair" not in meta[i]]
        pairs = [i for i in icons if isinstance(meta[i].get("pair"), dict) and meta[i].get("split") == "held-out"]
        if not single:
            raise UserError(
                "no sample has a subject and a style in its metadata: name the output of `limner data icons`"
            )

        def references(samples: list[int], split: Callable[[dict[str, Any]], object]) -> ReferenceSet:
            return ReferenceSet(
                pictures[samples],
                [captions[i][0] for i in samples],
                [str(meta[i]["subject"]) for i in samples],
                [str(meta[i].get("base", meta[i]["subject"])) for i in samples],
                [str(split(meta[i])) for i in samples],
            )

        return Icons(
            references(single, lambda m: m.get("held_out", "combination") if m.get("split") == "held-out" else "train"),
            [str(meta[i]["style"]) for i in single],
            [str(meta[i].get("set")) for i in single],
            [str(meta[i].get("look", "")) for i in single],
            references(pairs, lambda m: m["pair"].get("kind")),
            [str(meta[i]["pair"].get("style", meta[i]["style"])) for i in pairs],
        )

    @property
    def labeled(self) -> LabeledIcons:
        """Training data of the classifier: all single pictures."""
        return LabeledIcons(self.references.pictures, self.references.families, self.styles)

    def nearest_style_copies(self, targets: Sequence[int]) -> list[int | None]:
        """Return for each target the training picture of its subject in the nearest other style, preferably with the
        same skin tone; None if training does not have the subject."""
        references, distance, by_family = self.references, StyleDistance(self), defaultdict[str, list[int]](list)
        for i in references.split_indices("train"):
            by_family[references.families[i]].append(i)

        def copy(t: int) -> int | None:
            others = [i for i in by_family[references.families[t]] if self.styles[i] != self.styles[t]]

            def cost(i: int) -> tuple[float, bool]:
                return distance(self.styles[t], self.styles[i]), references.keys[i] != references.keys[t]

            return min(others, key=cost, default=None)

        return [copy(t) for t in targets]


class StyleDistance:
    """Mean squared error between two styles over at most `_MAX_SHARED` subjects that training has in both; infinite
    without one."""

    def __init__(self, icons: Icons) -> None:
        self.pictures, self.distances = icons.references.pictures, dict[frozenset[str], float]()
        self.by_style = dict[str, dict[str, int]]()
        for i in icons.references.split_indices("train"):
            self.by_style.setdefault(icons.styles[i], {}).setdefault(icons.references.keys[i], i)

    def __call__(self, a: str, b: str) -> float:
        if (pair := frozenset((a, b))) not in self.distances:
            sides = self.by_style.get(a, {}), self.by_style.get(b, {})
            shared = sorted(sides[0].keys() & sides[1].keys())[:_MAX_SHARED]
            left, right = (self.pictures[[side[key] for key in shared]].float() for side in sides)
            self.distances[pair] = float(F.mse_loss(left, right)) if shared else np.inf
        return self.distances[pair]


def grid_cells(icons: Icons, subjects: Sequence[str] = ()) -> Cells:
    """Return the cells of the named subjects in that order. By default eight subjects with a held-out combination,
    round-robin over styles, those with the most styles first.

    Raises `UserError` for a subject that the data set does not have.
    """
    references = icons.references
    pictures: dict[str, dict[str, int]] = {}
    for i, (subject, style) in enumerate(zip(references.keys, icons.styles, strict=True)):
        pictures.setdefault(subject, {}).setdefault(style, i)
    if not subjects:
        by_style: dict[str, list[str]] = {}
        for i in references.split_indices("combination"):
            if references.keys[i] == references.families[i]:  # one skin tone per subject
                by_style.setdefault(icons.styles[i], []).append(references.keys[i])
        rows = (sorted(subjects, key=lambda subject: -len(pictures[subject])) for subjects in by_style.values())
        held_out = [subject for turn in zip_longest(*rows) for subject in turn if subject]
        subjects = (held_out or list(pictures))[:_DEFAULT_ROWS]
    for subject in subjects:
        if subject not in pictures:
            raise UserError(f"unknown subject {subject!r}: {did_you_mean(subject, pictures)}")
    return {(subject, style): pictures[subject][style] for subject in subjects for style in sorted(pictures[subject])}


def draw_cells(
    pipe: TextToImage, icons: Icons, cells: Cells, candidates: int, seed: int, progress: Advance | None = None
) -> Tensor:
    """Generate the best of `candidates` drawings for each cell, uint8 [B, 3, H, W]."""
    captions = [icons.references.captions[i] for i in cells.values()]
    batches = generate_batches(pipe, captions, candidates, seed, progress=progress)
    return torch.cat([b.pictures[torch.arange(len(part)), best(b.scores, 1)[:, 0]] for part, b in batches])


def render_grid(icons: Icons, cells: Cells, drawings: Tensor, real: bool = False) -> Image.Image:
    """Render the grid; with `real`, the real picture is to the right of each drawing."""
    references = icons.references
    subjects, styles = list(dict.fromkeys(s for s, _ in cells)), sorted({style for _, style in cells})
    side = math.ceil(SIDE / drawings.shape[-1]) * drawings.shape[-1]
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
            grid.paste(to_image(pixels).resize((side, side), Image.Resampling.NEAREST), (x + column * offset, y))
    pen.text((LEFT, grid.height - 22), "framed: held-out combination of subject and style", FRAME, font)
    return grid
