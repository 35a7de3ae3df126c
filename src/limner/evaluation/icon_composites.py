"""Composites of icons for a detector: one to four icons at random places on white, with the boxes of their ink.

A class is a subject without its skin tone. A detector trained on them reads drawings of icons (`geneval.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from torch import Tensor

from limner.data.area_resize import area_resize
from limner.data.coco import collate
from limner.data.open_source import open_source
from limner.data.shard_writer import SUMMARY
from limner.errors import UserError
from limner.evaluation.icon_pictures import Icons
from limner.metrics.detection import BoxSet
from limner.tasks.scene_boxes import degrade

__all__ = ["IconComposites", "is_icons", "one_icon"]

MAX_ICONS = 4  # of a composite
MIN_SIDE, MAX_SIDE = 0.35, 0.6  # of an icon as shares of a composite's: the default boxes of small layouts fit
MIN_INK = 16  # levels by which a pixel differs from white
PLACES = 20  # tried for each icon


def is_icons(data: str | Path) -> bool:
    """Return True for a folder of shards with their summary, as `limner data icons` writes them."""
    return (Path(data) / SUMMARY).is_file() and any(Path(data).glob("*.tar"))


def one_icon(picture: np.ndarray, size: int) -> np.ndarray:
    """Return a composite of one icon, uint8 [size, size, 3]: the picture, uint8 [S, S, 3], in the middle at half the
    side."""
    canvas, side, edge = np.full((size, size, 3), 255, np.uint8), size // 2, size // 4
    canvas[edge : edge + side, edge : edge + side] = area_resize(picture, side, side)
    return canvas


class IconComposites:
    """New composites of the icons of a split, with blur and noise as in drawings.

    Args:
        icons: data set at the size of the composites, in pixels per side.
        split: one of `icon_pictures.SPLITS`. Classes are always those of its training pictures.
    """

    def __init__(self, icons: Icons, split: str = "train", count: int = 1 << 24) -> None:
        references, self.count = icons.references, count
        self.classes = sorted({references.families[i] for i in references.split_indices("train")})
        label_of = {name: i + 1 for i, name in enumerate(self.classes)}
        chosen = [i for i in references.split_indices(split) if references.families[i] in label_of]
        self.pictures = [p.permute(1, 2, 0).contiguous().numpy() for p in references.pictures[chosen]]
        self.labels = np.array([label_of[references.families[i]] for i in chosen], np.int64)
        self.size = references.pictures.shape[-1]

    @staticmethod
    def open(data: str | Path, size: int, split: str = "train") -> IconComposites:
        """Read the output of `limner data icons` or `limner data glyphs`. Raises `UserError` for other data, or if the
        split lacks icons whose subjects training pictures show."""
        composites = IconComposites(Icons.from_source(open_source(str(data)), size), split)
        if not composites.pictures:
            raise UserError(f"{data} lacks icons of the split {split!r} with known subjects: choose other data")
        return composites

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: np.ndarray, seeds: np.ndarray) -> dict[str, Tensor]:
        """Return {"pixels", "boxes", "labels"} as `MultiBoxLoss` expects them."""
        rngs = [np.random.default_rng(seed) for seed in seeds.tolist()]
        composites = [(self.compose(rng), rng) for rng in rngs]
        return collate([(degrade(picture, rng), boxes, labels) for (picture, boxes, labels), rng in composites])

    def labeled(self, count: int, seed: int) -> Iterator[tuple[np.ndarray, BoxSet]]:
        """Yield composites without blur and noise; composite i depends only on the seed and i."""
        for i in range(count):
            picture, boxes, labels = self.compose(np.random.default_rng([seed, i]))
            yield picture, BoxSet(boxes, labels)

    def compose(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return a picture uint8 [S, S, 3], boxes float32 [N, 4] in pixels that do not overlap, and labels [N]."""
        canvas = np.full((self.size, self.size, 3), 255, np.uint8)
        boxes, labels = list[np.ndarray](), list[int]()
        for _ in range(int(rng.integers(1, MAX_ICONS + 1))):
            index = int(rng.integers(len(self.pictures)))
            side = round(self.size * rng.uniform(MIN_SIDE, MAX_SIDE))
            icon = area_resize(self.pictures[index], side, side)
            rows, columns = np.nonzero((icon < 256 - MIN_INK).any(-1))
            for left, top in rng.integers(0, self.size - side + 1, (PLACES if len(rows) else 0, 2)).tolist():
                box = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1], np.float32)
                box += np.array([left, top, left, top], np.float32)
                if all((box[:2] >= other[2:]).any() or (box[2:] <= other[:2]).any() for other in boxes):
                    part = canvas[top : top + side, left : left + side]
                    np.minimum(part, icon, out=part)  # the ink of neighbors stays
                    boxes.append(box)
                    labels.append(int(self.labels[index]))
                    break
        return canvas, np.array(boxes, np.float32).reshape(-1, 4), np.array(labels, np.int64)
