"""Search and refinement: the templates, positions and tints that explain most of a picture (see `scene_reader.py`).

Shapes: `P` positions, `K` templates, `w` pixels along a window, `H'` and `W'` the sides of the padded picture.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from limner.tasks.background import BackgroundEstimate
from limner.tasks.scenes import SIZES, Size
from limner.tasks.templates import (
    BLURS,
    FORMS,
    NUM_FORMS,
    SEARCH_BLUR,
    TemplateBank,
    ring_width,
    square_sums,
    template_bank,
)

MIN_ENERGY_GAIN = 750.0  # least excess of energy explained over energy left, in levels^2 x square units
_MAX_OBJECTS = 12
_PALETTE_PENALTY = 0.5  # share of a tint's squared distance to the palette that counts as error


@dataclass(frozen=True)
class _Match:
    """Fits of templates to windows. Energies exclude the expected energy of noise."""

    inner: np.ndarray  # [3, P, K], T of `scene_reader.py`
    residual: np.ndarray  # [P, K], energy left over
    free_residual: np.ndarray  # [P, K], the same for an unconstrained tint
    total: np.ndarray  # [P], energy in the window


@dataclass(frozen=True)
class Fit:
    """The best template near a position; `y`, `x` are the corner of its window in the padded field."""

    size: Size
    y: int
    x: int
    template: int
    tint: np.ndarray  # [3], a difference from the background
    residual: float  # energy left over
    runner_up: float  # the same for the second-best form
    rival_gain: float  # energy that another form would explain in addition, with an unconstrained tint


class Canvas:
    """The unexplained residual `field` [3, H', W'], padded so that boxes may extend past the frame."""

    def __init__(self, pixels: np.ndarray, background: BackgroundEstimate, unit: int) -> None:
        self.unit, self.background, self.slack = unit, background, ring_width(unit)
        self.pad = self.slack + ring_width(unit)
        self.height, self.width = pixels.shape[:2]
        around = ((0, 0), (self.pad, self.pad), (self.pad, self.pad))
        self.field = np.pad((pixels - background.level).transpose(2, 0, 1), around)

    @property
    def residual(self) -> np.ndarray:
        """The residual inside the frame, [3, H, W]."""
        return self.field[:, self.pad : -self.pad, self.pad : -self.pad]

    def energy(self, window: int) -> np.ndarray:
        """Return the energy of all windows, [H' - w + 1, W' - w + 1], less that of noise."""
        energy = (self.field**2).sum(0, dtype=np.float64)
        energy[self.pad : -self.pad, self.pad : -self.pad] -= self.background.noise
        return square_sums(energy, window)

    def match(self, bank: TemplateBank, ys: np.ndarray, xs: np.ndarray, which: slice) -> _Match:
        """Fit templates `which` to the windows with corners at `ys`, `xs`, each [P]."""
        views = sliding_window_view(self.field, (bank.window, bank.window), (1, 2))
        windows = views[:, ys, xs].reshape(3, -1, bank.window**2)
        inner = windows @ bank.templates[which].T
        energy, paints = bank.energy[which], self.background.paints
        free = (inner**2).sum(0) / energy
        # With the tint fixed to color c: 2 <T, c> - n |c|^2.
        fixed = np.tensordot(2 * paints, inner, 1) - (paints**2).sum(1)[:, None, None] * energy
        gain = free + _PALETTE_PENALTY * (fixed.max(0) - free)
        total = self.energy(bank.window)[ys, xs]
        return _Match(inner=inner, residual=total[:, None] - gain, free_residual=total[:, None] - free, total=total)

    def candidates(self, row_step: int) -> list[tuple[Size, int, int]]:
        """Return up to twelve candidates, best first, as (size, y, x) of a window's corner."""
        steps = row_step, max(1, self.unit // 2)
        first = SEARCH_BLUR * NUM_FORMS
        least = MIN_ENERGY_GAIN * self.unit**2
        values: dict[Size, np.ndarray] = {}
        for size in SIZES:
            bank = template_bank(size, self.unit)
            energy = self.energy(bank.window)[:: steps[0], :: steps[1]]
            i, j = np.nonzero(energy >= least)
            match = self.match(bank, steps[0] * i, steps[1] * j, slice(first, first + len(FORMS)))
            values[size] = np.full(energy.shape, -np.inf)
            values[size][i, j] = match.total - 2 * match.residual.min(1)
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
                side, other_side = template_bank(size, self.unit).side - 1, template_bank(other, self.unit).side - 1
                overlap = (ys < y + side) & (y < ys + other_side), (xs < x + side) & (x < xs + other_side)
                value[np.ix_(*overlap)] = -np.inf
        return candidates

    def fit(self, size: Size, y: int, x: int) -> Fit:
        """Return the best fit of all templates of a size within half a unit of a position."""
        bank, reach = template_bank(size, self.unit), ring_width(self.unit)
        ys, xs = (
            np.arange(max(0, at - reach), min(at + reach, length - bank.window) + 1)
            for at, length in zip((y, x), self.field.shape[1:], strict=True)
        )
        ys, xs = np.repeat(ys, len(xs)), np.tile(xs, len(ys))
        match = self.match(bank, ys, xs, slice(None))
        place, best = np.unravel_index(match.residual.argmin(), match.residual.shape)
        form = best % NUM_FORMS
        by_form = match.residual.min(0).reshape(len(BLURS), -1).min(0)
        free_by_form = match.free_residual.min(0).reshape(len(BLURS), -1).min(0)
        return Fit(
            size=size,
            y=int(ys[place]),
            x=int(xs[place]),
            template=int(best),
            tint=match.inner[:, place, best] / bank.energy[best],
            residual=float(match.residual[place, best]),
            runner_up=float(np.delete(by_form, form).min()),
            rival_gain=float(free_by_form[form] - np.delete(free_by_form, form).min()),
        )

    def add(self, fit: Fit, sign: int) -> None:
        """Add a fitted object to the field (`sign` +1) or subtract it (-1)."""
        bank = template_bank(fit.size, self.unit)
        template = bank.templates[fit.template].reshape(bank.window, bank.window)
        window = self.field[:, fit.y : fit.y + bank.window, fit.x : fit.x + bank.window]
        window += sign * fit.tint[:, None, None] * template
