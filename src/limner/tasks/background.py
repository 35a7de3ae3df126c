"""Background estimation: paint, color cast and noise of a picture's background."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from limner.tasks.scenes import BACKGROUNDS, COLORS

_PALETTE = np.array(list(COLORS.values()), np.float32)  # [C, 3]
TINT = 45.0  # largest distance of a tint from its palette color, in levels (the closest two are 92 apart)


@dataclass(frozen=True)
class Ground:
    """A background paint with its measured level and noise."""

    name: str
    level: np.ndarray  # [3]
    paints: np.ndarray  # [C, 3], the palette as differences from `level`
    noise: float  # energy of noise per pixel


def grounds(pixels: np.ndarray, names: Sequence[str]) -> Iterator[Ground]:
    """Yield the candidate backgrounds of `pixels`, float32 [H, W, 3], most frequent first."""
    known = np.array([BACKGROUNDS.get(n) or COLORS[n] for n in names], np.float32)
    paints = np.concatenate([known, _PALETTE])
    flat = pixels.reshape(-1, 3)
    nearest = ((paints**2).sum(1) - 2 * flat @ paints.T).argmin(1)
    counts = np.bincount(nearest, minlength=len(paints))[: len(names)]
    for k in np.argsort(-counts, kind="stable"):
        if counts[k] < 0.2 * len(flat):
            return
        mine = flat[nearest == k]
        level = np.median(mine, 0)
        cast = level - known[k]
        if cast @ cast > TINT**2:
            continue
        # 1.48 x the median absolute deviation is the sigma of Gaussian noise.
        noise = float(((1.4826 * np.median(abs(mine - level), 0)) ** 2).sum())
        yield Ground(names[int(k)], level, np.clip(_PALETTE + cast, 0, 255) - level, noise)
