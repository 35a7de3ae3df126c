"""Nearest real picture to a drawing: a score for data without a scene parser, such as emoji.

The best of N drawings of a caption is compared with *every* real picture by mean squared error over pixels. The drawing
is right if the nearest picture is the one of the caption, and related if it is of the same family (another skin tone or
gender). With M real pictures a uniform guess is right with probability 1 / M.

Captions can be few, so each may be drawn several times. Intervals are clustered by family (`confidence.py`): they cover
other families of the same kind.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from limner.data.datasets import ImageCaptionDataset
from limner.data.sample import Source
from limner.evaluation.confidence import TEST_SEEDS_FROM
from limner.evaluation.generate_batches import generate_batches, to_image
from limner.evaluation.report import SheetRow
from limner.evaluation.result import EvalResult
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
) -> EvalResult:
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
    clusters = families[targets].tolist()
    captions = [(references.captions[t], references.captions[i]) for t, i in zip(targets, nearest, strict=True)]
    return EvalResult.from_verdicts(
        f"{split}, {len(set(targets)):,} captions of {len(set(clusters)):,} families, drawn {repeats} times",
        {f"best of {candidates}": {"right picture": right, "or a variant": right | same_family}},
        clusters,
        [{"caption": caption, "nearest": other} for caption, other in captions],
        {"right picture": 1 / len(references.keys)},
        settings={"model": pipe.name, "candidates": candidates, "repeats": repeats, "seed": seed},
        sheet=[
            SheetRow(
                caption=caption, right=bool(is_right),
                pictures=[(to_image(drawing), "drawn"), (to_image(references.pictures[t]), "real")],
            )
            for (caption, _), is_right, drawing, t in zip(captions, right, torch.cat(drawings), targets, strict=True)
        ],
    )  # fmt: skip
