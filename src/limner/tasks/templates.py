"""Templates of the scene parser: all forms of one size, sharp and blurred; and sums over squares."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from limner.data.area_resize import area_weights
from limner.tasks.rendering import alpha_mask
from limner.tasks.scenes import EXTENT, FILLS, SHAPES, Fill, Shape, Size

FORMS: tuple[tuple[Shape, Fill], ...] = tuple(product(SHAPES, FILLS))
NUM_FORMS = len(FORMS) + len(SHAPES)  # with the distractors of `TemplateBank`
BLURS = (0.0, 0.6, 0.9, 1.2)  # sigma of the Gaussian blur, in quarters of a unit
SEARCH_BLUR = 2  # index into `BLURS` of the blur used in the search
_DISTRACTOR_SIDE = 4  # side of the distractors, in units


@dataclass(frozen=True)
class TemplateBank:
    """The templates of one size, in windows that hold the box and the ring around it.

    Distractors, solid shapes between small and large, follow the forms. No scene contains them, but
    without them a circle of four units would pass for a large diamond.
    """

    side: int  # side of the box, in pixels
    window: int  # w, in pixels
    templates: np.ndarray  # float32 [K, w * w], K = blurs x forms
    energy: np.ndarray  # float32 [K], |t|^2
    area: np.ndarray  # float32 [K]


@lru_cache(maxsize=8)
def template_bank(size: Size, unit: int) -> TemplateBank:
    """Return the templates of one size, at `unit` pixels per unit."""
    ring = ring_width(unit)
    w = EXTENT[size] * unit + 2 * ring
    forms = [alpha_mask(shape, size, fill, unit) for shape, fill in FORMS]
    shrink = area_weights(EXTENT["large"] * unit, _DISTRACTOR_SIDE * unit).astype(np.float32)
    distractors = [shrink @ alpha_mask(s, "large", "solid", unit) @ shrink.T for s in SHAPES]
    margins = [(w - len(s)) // 2 for s in forms + distractors]
    sharp = np.stack([np.pad(s, (m, w - len(s) - m)) for s, m in zip(forms + distractors, margins, strict=True)])
    distance = np.subtract.outer(np.arange(w), np.arange(w))
    blurred = [sharp]
    for sigma in BLURS[1:]:
        kernel = np.exp(-0.5 * (distance / (sigma * unit / 4)) ** 2)
        kernel /= kernel[w // 2].sum()
        blurred.append(kernel @ sharp @ kernel)
    templates = np.concatenate(blurred).reshape(-1, w * w).astype(np.float32)
    return TemplateBank(w - 2 * ring, w, templates, (templates**2).sum(1), templates.sum(1))


def ring_width(unit: int) -> int:
    """Return the width of the ring around a box, half a unit, in pixels."""
    return (unit + 1) // 2


def square_sums(values: np.ndarray, side: int) -> np.ndarray:
    """Return the sums of `values` [H, W] over all squares, [H - side + 1, W - side + 1]."""
    sums = np.pad(values.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    return sums[side:, side:] - sums[:-side, side:] - sums[side:, :-side] + sums[:-side, :-side]


def block(field: np.ndarray, top: int, left: int, side: int) -> np.ndarray:
    """Return a view of the part of a square inside `field` [H, W]."""
    return field[max(0, top) : max(0, top + side), max(0, left) : max(0, left + side)]
