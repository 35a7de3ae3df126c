"""Nearest real picture to a drawing: a score for data without a scene parser, such as emoji.

The best of N drawings of a caption is compared with *every* real picture by mean squared error over pixels. The drawing
is right if the nearest picture is the one of the caption, and related if it is of the same family (another skin tone or
gender). With M real pictures a uniform guess is right with probability 1 / M.

Captions can be few, so each may be drawn several times. Intervals are clustered by family (`confidence.py`): they cover
other families of the same kind.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from limner.data.datasets import ImageCaptionDataset
from limner.data.sample import Source
from limner.evaluation.confidence import TEST_SEEDS_FROM, Proportion
from limner.evaluation.generate_batches import generate_batches
from limner.pipeline import TextToImage
from limner.progress import Advance
from limner.sampling.rerank import best


@dataclass(frozen=True)
class ReferenceSet:
    """M real pictures with their labels."""

    pictures: Tensor  # uint8 [M, 3, H, W]
    captions: list[str]  # first caption of each, [M]
    keys: list[str]  # identity of each, [M]; pictures of one key show the same subject
    families: list[str]  # [M]
    splits: list[str]  # [M]

    @staticmethod
    def from_source(source: Source, size: int, key: str = "emoji", family: str = "family") -> ReferenceSet:
        """Read a whole source at `size` pixels per side, without the samples that cannot be read."""
        indices, pictures, captions, _ = ImageCaptionDataset(source, size).load(np.arange(len(source)))
        metadata = [source.meta(int(i)) for i in indices]
        return ReferenceSet(
            pictures,
            [phrasings[0] for phrasings in captions],
            [str(meta.get(key, i)) for i, meta in zip(indices, metadata, strict=True)],
            [str(meta.get(family, meta.get(key, i))) for i, meta in zip(indices, metadata, strict=True)],
            [str(meta.get("split", "train")) for meta in metadata],
        )

    def split_indices(self, split: str, n: int | None = None, seed: int = 0) -> list[int]:
        """Return the indices of `n` random pictures of a split, by default of all of them."""
        indices = [i for i, name in enumerate(self.splits) if name == split]
        if n is not None and n < len(indices):
            indices = sorted(np.random.default_rng(seed).choice(indices, n, replace=False).tolist())
        return indices


def nearest_picture(real: Tensor, pictures: Tensor) -> Tensor:
    """Return the index of the nearest real picture by squared error: uint8 [M, 3, H, W], [B, 3, H, W] -> [B]."""
    drawings = pictures.flatten(1).float() / 255
    # |a - b|^2 = |a|^2 - 2 ab + |b|^2, where |a|^2 does not change the order
    distance = [(b := part.float() / 255).square().sum(1) - 2 * drawings @ b.T for part in real.flatten(1).split(1024)]
    return torch.cat(distance, 1).argmin(1)


@dataclass(frozen=True)
class NearestResult:
    """Nearest real pictures to B drawings of a split."""

    split: str
    targets: list[int]  # reference index of the caption's picture, [B]
    nearest: list[int]  # reference index of the nearest picture, [B]
    families: list[str]  # of the target pictures, [B]
    right: np.ndarray  # same key, bool [B]
    related: np.ndarray  # same key or family, bool [B]
    pictures: Tensor  # best drawings, uint8 [B, 3, H, W]
    settings: dict[str, Any]  # of the generation

    def rates(self) -> tuple[Proportion, Proportion]:
        """Return the shares of right and of related pictures."""
        return Proportion.from_values(self.right, self.families), Proportion.from_values(self.related, self.families)

    def table(self) -> str:
        right, related = self.rates()
        return (
            f"{self.split}, {len(set(self.targets)):,} captions of {len(set(self.families)):,} families, "
            f"drawn {self.settings['repeats']} times, best of {self.settings['candidates']}\n"
            f"  nearest real picture is the right one        {right}\n"
            f"  the right one or another variant of it       {related}"
        )

    def to_dict(self, references: ReferenceSet) -> dict[str, Any]:
        right, related = self.rates()
        rows = [
            {"caption": references.captions[t], "nearest": references.captions[n], "right": bool(r), "related": bool(v)}
            for t, n, r, v in zip(self.targets, self.nearest, self.right, self.related, strict=True)
        ]
        rates = {"right": right.to_dict(), "right or variant": related.to_dict()}
        return {"split": self.split, **rates, "settings": self.settings, "captions": rows}


def evaluate(
    pipe: TextToImage,
    references: ReferenceSet,
    split: str,
    *,
    n: int | None = None,
    candidates: int = 16,
    repeats: int = 1,
    seed: int = TEST_SEEDS_FROM,
    progress: Advance | None = None,
) -> NearestResult:
    """Draw the captions of `n` pictures of a split that is not empty, `repeats` times, and select the best of
    `candidates` each time; drawing i uses `drawing_seed(seed, i)`."""
    targets = references.split_indices(split, n, seed) * repeats
    nearest, drawings = [], []
    for part, batch in generate_batches(pipe, [references.captions[i] for i in targets], candidates, seed):
        drawings.append(batch.pictures[torch.arange(len(part)), best(batch.scores, 1)[:, 0]])
        nearest += nearest_picture(references.pictures, drawings[-1]).tolist()
        if progress:
            progress(len(part))
    keys, families = np.array(references.keys, object), np.array(references.families, object)
    right, same_family = keys[targets] == keys[nearest], families[targets] == families[nearest]
    settings = {"model": pipe.name, "candidates": candidates, "repeats": repeats, "seed": seed}
    return NearestResult(
        split, targets, nearest, families[targets].tolist(), right, right | same_family, torch.cat(drawings), settings
    )


def mosaic(references: ReferenceSet, result: NearestResult, n: int = 48, columns: int = 8) -> Image.Image:
    """Render the first `n` pairs of a drawing (left) and its real picture (right)."""
    pairs = torch.cat((result.pictures[:n], references.pictures[result.targets[:n]]), dim=3)
    columns = max(1, min(columns, len(pairs)))
    rows = math.ceil(len(pairs) / columns)
    pairs = F.pad(pairs, (0, 8, 0, 8, 0, 0, 0, rows * columns - len(pairs)), value=255)
    sheet = pairs.unflatten(0, (rows, columns)).permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)
    return Image.fromarray(sheet.contiguous().numpy())
