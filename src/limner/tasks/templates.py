"""The stencils that a picture is read with: all looks of one size, sharp and blurred, and sums over squares."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from limner.data.area_resize import area_weights
from limner.tasks.rendering import stencil
from limner.tasks.scenes import EXTENT, FILLS, SHAPES, Fill, Shape, Size

LOOKS: tuple[tuple[Shape, Fill], ...] = tuple(product(SHAPES, FILLS))
ALL_LOOKS = len(LOOKS) + len(SHAPES)  # with the strangers, see `Bank`
BLURS = (0.0, 0.6, 0.9, 1.2)  # sigma of the softened stencils, in quarters of a unit
SEARCH_BLUR = 2  # the one used to find places
_MIDDLE = 4  # units; the side of things that are neither small nor large


@dataclass(frozen=True)
class Bank:
    """The stencils of one size, in windows that hold the box and the ring around it.

    After those of the looks come "strangers", solid shapes between small and large: they belong to
    no scene, but without them a circle of four units would pass for a large diamond.
    """

    side: int  # of the box, in pixels
    window: int  # w
    stencils: np.ndarray  # float32 [K, w * w], K = blurs x looks
    energy: np.ndarray  # float32 [K], |t|^2
    area: np.ndarray  # float32 [K]


@lru_cache(maxsize=8)
def bank_of(size: Size, unit: int) -> Bank:
    """The stencils of things of a size, at `unit` pixels per unit."""
    ring = ring_of(unit)
    w = EXTENT[size] * unit + 2 * ring
    known = [stencil(shape, size, fill, unit) for shape, fill in LOOKS]
    shrink = area_weights(EXTENT["large"] * unit, _MIDDLE * unit).astype(np.float32)
    strangers = [shrink @ stencil(s, "large", "solid", unit) @ shrink.T for s in SHAPES]
    margins = [(w - len(s)) // 2 for s in known + strangers]
    sharp = np.stack([np.pad(s, (m, w - len(s) - m)) for s, m in zip(known + strangers, margins, strict=True)])
    distance = np.subtract.outer(np.arange(w), np.arange(w))
    soft = [sharp]
    for sigma in BLURS[1:]:
        kernel = np.exp(-0.5 * (distance / (sigma * unit / 4)) ** 2)
        kernel /= kernel[w // 2].sum()
        soft.append(kernel @ sharp @ kernel)
    stencils = np.concatenate(soft).reshape(-1, w * w).astype(np.float32)
    return Bank(w - 2 * ring, w, stencils, (stencils**2).sum(1), stencils.sum(1))


def ring_of(unit: int) -> int:
    """Half a unit, in pixels: how wide the ring around a box is."""
    return (unit + 1) // 2


def square_sums(values: np.ndarray, side: int) -> np.ndarray:
    """Sums of [H, W] over all squares, [H - side + 1, W - side + 1]."""
    sums = np.pad(values.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    return sums[side:, side:] - sums[:-side, side:] - sums[side:, :-side] + sums[:-side, :-side]


def block(field: np.ndarray, top: int, left: int, side: int) -> np.ndarray:
    """The part of a square that lies on `field` [H, W], as a view."""
    return field[max(0, top) : max(0, top + side), max(0, left) : max(0, left + side)]
