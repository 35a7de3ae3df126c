"""The real picture that a drawing is most like: a score for data without an oracle, such as emoji.

A caption is drawn, the best of N is compared with *every* real picture by mean squared error over the
pixels, and the nearest one tells what was drawn: the right one, or at least one of the same family
(another skin tone or gender of it). That is a hard question for 3,900 pictures: by chance the answer is
right once in 3,900 times.

Captions are few, so each may be drawn several times. Intervals are over families, whose emoji are
variants of each other (see `confidence.py`): they say how far the share may be off for other such emoji.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from limner.data.datasets import ImageCaptionDataset
from limner.data.sample import Source
from limner.evaluation.confidence import PUBLISHED, Rate
from limner.evaluation.generate_batches import drawn
from limner.json_files import write_json
from limner.pipeline import TextToImage
from limner.progress import Advance
from limner.sampling.rerank import best


@dataclass(frozen=True)
class Gallery:
    """All real pictures, and what each is.

    Attributes:
        pictures: uint8 [M, 3, H, W].
        captions: the first phrasing of each.
        keys, families, splits: [M] texts; pictures of one key are the same thing.
    """

    pictures: Tensor
    captions: list[str]
    keys: list[str]
    families: list[str]
    splits: list[str]

    @staticmethod
    def of(source: Source, size: int, key: str = "emoji", family: str = "family") -> Gallery:
        """Read a whole source at `size` pixels per side; samples that cannot be read are left out."""
        found, pictures, captions, _ = ImageCaptionDataset(source, size).load(np.arange(len(source)))
        facts = [source.meta(int(i)) for i in found]
        return Gallery(
            pictures,
            [phrasings[0] for phrasings in captions],
            [str(fact.get(key, i)) for i, fact in zip(found, facts, strict=True)],
            [str(fact.get(family, fact.get(key, i))) for i, fact in zip(found, facts, strict=True)],
            [str(fact.get("split", "train")) for fact in facts],
        )

    def choose(self, split: str, n: int | None = None, seed: int = 0) -> list[int]:
        """Indices of `n` pictures of a split (all of them by default), at random."""
        mine = [i for i, name in enumerate(self.splits) if name == split]
        if n is not None and n < len(mine):
            mine = sorted(np.random.default_rng(seed).choice(mine, n, replace=False).tolist())
        return mine

    def nearest(self, pictures: Tensor) -> Tensor:
        """Index of the real picture with the least squared error: uint8 [B, 3, H, W] -> [B]."""
        return nearest_picture(self.pictures, pictures)


def nearest_picture(real: Tensor, pictures: Tensor) -> Tensor:
    """Index of the real picture with the least squared error: uint8 [M, 3, H, W] and [B, 3, H, W] -> [B]."""
    drawings = pictures.flatten(1).float() / 255
    # |a - b|^2 = |a|^2 - 2 ab + |b|^2, of which |a|^2 is the same for all b
    distance = [(b := part.float() / 255).square().sum(1) - 2 * drawings @ b.T for part in real.flatten(1).split(1024)]
    return torch.cat(distance, 1).argmin(1)


@dataclass(frozen=True)
class Nearest:
    """For each of B drawings: what was asked for, what it is nearest to, the drawing.

    Attributes:
        wanted, found: indices into the gallery, [B].
        families: of what was asked for, [B].
        right, related: bool [B]; the same key, the same key or family.
        pictures: uint8 [B, 3, H, W], the best drawings.
    """

    split: str
    wanted: list[int]
    found: list[int]
    families: list[str]
    right: np.ndarray
    related: np.ndarray
    pictures: Tensor
    settings: dict[str, Any]

    def rates(self) -> tuple[Rate, Rate]:
        """The shares of exactly the right one, and of the right one or a variant of it."""
        return Rate.of(self.right, self.families), Rate.of(self.related, self.families)

    def table(self) -> str:
        right, related = self.rates()
        return (
            f"{self.split}, {len(set(self.wanted)):,} captions of {len(set(self.families)):,} families, "
            f"drawn {self.settings['repeats']} times, best of {self.settings['candidates']}\n"
            f"  nearest real picture is the right one        {right}\n"
            f"  the right one or another variant of it       {related}"
        )

    def to_dict(self, gallery: Gallery) -> dict[str, Any]:
        right, related = self.rates()
        rows = [
            {"caption": gallery.captions[w], "nearest": gallery.captions[f], "right": bool(r), "related": bool(v)}
            for w, f, r, v in zip(self.wanted, self.found, self.right, self.related, strict=True)
        ]
        rates = {"right": right.to_dict(), "right or variant": related.to_dict()}
        return {"split": self.split, **rates, "settings": self.settings, "captions": rows}


def evaluate(
    pipe: TextToImage,
    gallery: Gallery,
    split: str,
    *,
    n: int | None = None,
    candidates: int = 16,
    repeats: int = 1,
    seed: int = PUBLISHED,
    progress: Advance | None = None,
) -> Nearest:
    """Draw the captions of `n` pictures of a split in turn, all of them `repeats` times, each time with `candidates` to
    choose from. Drawing i has the seed `drawing_seed(seed, i)`."""
    wanted = gallery.choose(split, n, seed) * repeats
    found, drawings = [], []
    for part, made in drawn(pipe, [gallery.captions[i] for i in wanted], candidates, seed):
        chosen = made.pictures[torch.arange(len(part)), best(made.scores, 1)[:, 0]]
        found += gallery.nearest(chosen).tolist()
        drawings.append(chosen)
        if progress:
            progress(len(part))
    keys, families = gallery.keys, gallery.families
    right = np.array([keys[w] == keys[f] for w, f in zip(wanted, found, strict=True)], bool)
    kin = np.array([families[w] == families[f] for w, f in zip(wanted, found, strict=True)], bool)
    shape = (0, *gallery.pictures.shape[1:])
    pictures = torch.cat(drawings) if drawings else torch.empty(shape, dtype=torch.uint8)
    settings = {"model": pipe.name, "candidates": candidates, "repeats": repeats, "seed": seed}
    return Nearest(split, wanted, found, [families[w] for w in wanted], right, right | kin, pictures, settings)


def save(path: str | Path, gallery: Gallery, results: Sequence[Nearest]) -> None:
    """All results as JSON."""
    write_json(path, [result.to_dict(gallery) for result in results], indent=1, ensure_ascii=False)


def mosaic(gallery: Gallery, result: Nearest, n: int = 48, columns: int = 8) -> Image.Image:
    """Pairs side by side, the drawing left and the real picture right, for the eye."""
    n = min(n, len(result.wanted))
    h, w = gallery.pictures.shape[2:]
    columns = max(1, min(columns, n))
    sheet = Image.new("RGB", (columns * (2 * w + 8), math.ceil(n / columns) * (h + 8)), "white")
    for i in range(n):
        x, y = i % columns * (2 * w + 8), i // columns * (h + 8)
        for dx, picture in ((0, result.pictures[i]), (w, gallery.pictures[result.wanted[i]])):
            sheet.paste(Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy()), (x + dx, y))
    return sheet
