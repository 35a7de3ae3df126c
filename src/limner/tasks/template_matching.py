"""Search and refinement of the scene parser (`scene_reader.py`): templates, and where they explain most of a picture.

Shapes: `P` positions, `K` templates, `w` pixels along a window, `H'` and `W'` the sides of the padded picture.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from limner.data.area_resize import area_weights
from limner.tasks.rendering import alpha_mask
from limner.tasks.scenes import EXTENT, FILLS, SHAPES, SIZES, Fill, Shape, Size

FORMS: tuple[tuple[Shape, Fill], ...] = tuple(product(SHAPES, FILLS))
NUM_FORMS = len(FORMS) + len(SHAPES)  # with the distractors of `template_bank`
MIN_ENERGY_GAIN = 750.0  # least excess of energy explained over energy left, in levels^2 x square units
_BLURS = (0.0, 0.6, 0.9, 1.2)  # sigma of the Gaussian blur, in quarters of a unit
SEARCH_TEMPLATES = slice(2 * NUM_FORMS, 3 * NUM_FORMS)  # the blur of the search is 0.9
_DISTRACTOR_SIDE = 4  # in units
_MAX_OBJECTS = 12
_PALETTE_PENALTY = 0.5  # share of a tint's squared distance to the palette that counts as error


class TemplateBank(NamedTuple):
    """The templates of one size, in windows that hold the box and the ring around it."""

    window: int  # w, in pixels
    templates: np.ndarray  # float32 [K, w * w], K = blurs x forms
    energy: np.ndarray  # float32 [K], |t|^2
    area: np.ndarray  # float32 [K]


@lru_cache(maxsize=8)
def template_bank(size: Size, unit: int) -> TemplateBank:
    """Return the templates of one size, at `unit` pixels per unit.

    Distractors, solid shapes between small and large, follow the forms of each blur. No scene contains them, but
    without them a circle of four units would pass for a large diamond.
    """
    w = EXTENT[size] * unit + 2 * ring_width(unit)
    shrink = area_weights(EXTENT["large"] * unit, _DISTRACTOR_SIDE * unit).astype(np.float32)
    masks = [alpha_mask(shape, size, fill, unit) for shape, fill in FORMS]
    masks += [shrink @ alpha_mask(shape, "large", "solid", unit) @ shrink.T for shape in SHAPES]
    margins = [(w - len(mask)) // 2 for mask in masks]
    sharp = np.stack([np.pad(mask, (m, w - len(mask) - m)) for mask, m in zip(masks, margins, strict=True)])
    distance = np.subtract.outer(np.arange(w), np.arange(w))
    blurred = [sharp]
    for sigma in _BLURS[1:]:
        kernel = np.exp(-0.5 * (distance / (sigma * unit / 4)) ** 2)
        kernel /= kernel[w // 2].sum()
        blurred.append(kernel @ sharp @ kernel)
    templates = np.concatenate(blurred).reshape(-1, w * w).astype(np.float32)
    return TemplateBank(w, templates, (templates**2).sum(1), templates.sum(1))


def ring_width(unit: int) -> int:
    """Return the width of the ring around a box, half a unit, in pixels."""
    return (unit + 1) // 2


def square_sums(values: np.ndarray, side: int) -> np.ndarray:
    """Return the sums of `values` [H, W] over all squares, [H - side + 1, W - side + 1]."""
    sums = np.pad(values.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    return sums[side:, side:] - sums[:-side, side:] - sums[side:, :-side] + sums[:-side, :-side]


class Fit(NamedTuple):
    """The best template near a position; energies are without that of noise."""

    size: Size
    y: int  # corner of the window in the padded field
    x: int
    template: int
    tint: np.ndarray  # [3], a difference from the background
    residual: float  # energy left over
    runner_up: float  # the same for the second-best form
    rival_gain: float  # energy that another form would explain in addition, with an unconstrained tint


class Canvas:
    """The unexplained difference `field` [3, H', W'] of a picture and its background.

    It is padded, so that boxes may extend past the frame. `noise` is the energy of noise per pixel, scalar or [H, W].
    """

    def __init__(self, difference: np.ndarray, noise: float | np.ndarray, unit: int) -> None:
        self.unit, self.noise, self.pad = unit, noise, 2 * ring_width(unit)
        self.field = np.pad(difference, ((0, 0), (self.pad, self.pad), (self.pad, self.pad)))

    @property
    def inside(self) -> np.ndarray:
        """The field inside the frame, [3, H, W]."""
        return self.field[:, self.pad : -self.pad, self.pad : -self.pad]

    def energy(self, window: int) -> np.ndarray:
        """Return the energy of all windows, [H' - w + 1, W' - w + 1], less that of noise."""
        energy = (self.field**2).sum(0, dtype=np.float64)
        energy[self.pad : -self.pad, self.pad : -self.pad] -= self.noise
        return square_sums(energy, window)

    def inner_products(self, bank: TemplateBank, ys: np.ndarray, xs: np.ndarray, which: slice) -> np.ndarray:
        """Return `T` of `scene_reader.py`, [3, P, K], for the windows with corners at `ys`, `xs`, each [P]."""
        views = sliding_window_view(self.field, (bank.window, bank.window), (1, 2))
        return views[:, ys, xs].reshape(3, -1, bank.window**2) @ bank.templates[which].T

    def candidates(self, paints: np.ndarray, row_step: int) -> list[tuple[Size, int, int]]:
        """Return up to twelve candidates, best first, as (size, y, x) of a window's corner; `paints` is [C, 3]."""
        steps = row_step, max(1, self.unit // 2)
        least = MIN_ENERGY_GAIN * self.unit**2
        which = slice(SEARCH_TEMPLATES.start, SEARCH_TEMPLATES.start + len(FORMS))
        values: dict[Size, np.ndarray] = {}
        for size in SIZES:
            bank = template_bank(size, self.unit)
            energy = self.energy(bank.window)[:: steps[0], :: steps[1]]
            i, j = np.nonzero(energy >= least)
            inner = self.inner_products(bank, steps[0] * i, steps[1] * j, which)
            explained = _explained(inner, bank.energy[which], paints)[1]
            total = energy[i, j]
            values[size] = np.full(energy.shape, -np.inf)
            values[size][i, j] = total - 2 * (total[:, None] - explained).min(1)
        candidates: list[tuple[Size, int, int]] = []
        while len(candidates) < _MAX_OBJECTS:
            size = max(SIZES, key=lambda s: values[s].max())
            i, j = np.unravel_index(values[size].argmax(), values[size].shape)
            if values[size][i, j] < least:
                break
            y, x = int(i) * steps[0], int(j) * steps[1]
            candidates.append((size, y, x))
            for other, value in values.items():  # no two candidates overlap by more than a pixel
                ys, xs = (step * np.arange(n) for step, n in zip(steps, value.shape, strict=True))
                side, other_side = (EXTENT[s] * self.unit - 1 for s in (size, other))
                overlap = (ys < y + side) & (y < ys + other_side), (xs < x + side) & (x < xs + other_side)
                value[np.ix_(*overlap)] = -np.inf
        return candidates

    def fit(self, paints: np.ndarray, size: Size, y: int, x: int) -> Fit:
        """Return the best fit of all templates of a size within half a unit of a position."""
        bank, reach = template_bank(size, self.unit), ring_width(self.unit)
        ranges = (
            np.arange(max(0, at - reach), min(at + reach, length - bank.window) + 1)
            for at, length in zip((y, x), self.field.shape[1:], strict=True)
        )
        ys, xs = (grid.ravel() for grid in np.meshgrid(*ranges, indexing="ij"))
        inner = self.inner_products(bank, ys, xs, slice(None))
        total = self.energy(bank.window)[ys, xs, None]
        free_residual, residual = (total - explained for explained in _explained(inner, bank.energy, paints))
        place, best = np.unravel_index(residual.argmin(), residual.shape)
        by_form, free_by_form = (values.min(0).reshape(len(_BLURS), -1).min(0) for values in (residual, free_residual))
        form = best % NUM_FORMS
        return Fit(
            size=size,
            y=int(ys[place]),
            x=int(xs[place]),
            template=int(best),
            tint=inner[:, place, best] / bank.energy[best],
            residual=float(residual[place, best]),
            runner_up=float(np.delete(by_form, form).min()),
            rival_gain=float(free_by_form[form] - np.delete(free_by_form, form).min()),
        )

    def add(self, fit: Fit, sign: int) -> None:
        """Add a fitted object to the field (`sign` +1) or subtract it (-1)."""
        bank = template_bank(fit.size, self.unit)
        template = bank.templates[fit.template].reshape(bank.window, bank.window)
        window = self.field[:, fit.y : fit.y + bank.window, fit.x : fit.x + bank.window]
        window += sign * fit.tint[:, None, None] * template


def _explained(inner: np.ndarray, energy: np.ndarray, paints: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the energy that templates explain with a free tint, and less a penalty for one off the palette, [P, K]."""
    free = (inner**2).sum(0) / energy
    # With the tint fixed to color c: 2 <T, c> - n |c|^2.
    fixed = np.tensordot(2 * paints, inner, 1) - (paints**2).sum(1)[:, None, None] * energy
    return free, free + _PALETTE_PENALTY * (fixed.max(0) - free)
