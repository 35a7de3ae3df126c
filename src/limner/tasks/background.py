"""Background estimation: paint, color cast and noise of a picture's background."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from limner.tasks.scenes import BACKGROUNDS, COLORS

_PALETTE = np.array(list(COLORS.values()), np.float32)  # [C, 3]
MAX_TINT_DISTANCE = 45.0  # of a tint from its palette color, in levels (the closest two are 92 apart)
_MIN_SHARE = 0.2  # of pixels nearest to a paint, for a background


@dataclass(frozen=True)
class BackgroundEstimate:
    """A background paint with its measured level and noise."""

    name: str
    level: np.ndarray  # [3]
    paints: np.ndarray  # [C, 3], the palette as differences from `level`
    noise: float  # energy of noise per pixel


def estimate_backgrounds(pixels: np.ndarray, names: Sequence[str]) -> Iterator[BackgroundEstimate]:
    """Yield the candidate backgrounds of `pixels`, float32 [H, W, 3], most frequent first."""
    candidates = np.array([BACKGROUNDS.get(n) or COLORS[n] for n in names], np.float32)
    paints = np.concatenate([candidates, _PALETTE])
    flat = pixels.reshape(-1, 3)
    nearest = ((paints**2).sum(1) - 2 * flat @ paints.T).argmin(1)
    counts = np.bincount(nearest, minlength=len(paints))[: len(names)]
    for k in np.argsort(-counts, kind="stable"):
        if counts[k] < _MIN_SHARE * len(flat):
            return
        members = flat[nearest == k]
        level = np.median(members, 0)
        cast = level - candidates[k]
        if cast @ cast > MAX_TINT_DISTANCE**2:
            continue
        # 1.48 x the median absolute deviation is the sigma of Gaussian noise.
        noise = float(((1.4826 * np.median(abs(members - level), 0)) ** 2).sum())
        yield BackgroundEstimate(names[int(k)], level, np.clip(_PALETTE + cast, 0, 255) - level, noise)
