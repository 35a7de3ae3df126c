"""Doubt: whether a fitted thing is believed (see `scene_reader.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from limner.tasks.background import TINT
from limner.tasks.scenes import COLORS, EXTENT, UNITS, Thing
from limner.tasks.template_matching import Canvas, Fit
from limner.tasks.templates import ALL_LOOKS, LOOKS, bank_of, square_sums

# Measured on degraded scenes and on malformed things: see the tests.
_FREE_ERROR = 0.35  # of the contrast: what blur and compression may do to a pixel
WRONG = 0.07  # largest share of a thing's area that may be plainly wrong
_TOSS_UP = 0.92  # residual of the best look over that of the second best
_TOSS_UP_FROM = 0.04  # ... which matters only where the residual is at least this share of energy
_USURPED = 0.012  # of its energy: a half-opaque square is not a square of blurred stripes
_BITE_SIDE = 3 / 4  # units; of the squares over which a thing's errors are averaged
_BITE = 0.45  # of the contrast: largest such average
_NOISE_REACH = 1.3  # root mean squares of noise: nine in ten noisy pixels are nearer than this


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """Something seen in the box at `x`, `y` with `side`, in units.

    `thing` is None if what is there is no thing of this world. `doubt` grows from 0 (as rendered) to 1
    (barely believed) and beyond. `residual` is the energy left unexplained, as a share of the thing's own
    (slightly negative under noise).
    """

    thing: Thing | None
    x: float
    y: float
    side: float
    doubt: float
    residual: float


def weigh(canvas: Canvas, fit: Fit, errors: np.ndarray) -> Sighting:
    """Whether a fit is believed, given the `errors` [H', W'] that all fits together leave."""
    bank, paints = bank_of(fit.size, canvas.unit), canvas.ground.paints
    distances = np.linalg.norm(paints - fit.tint, axis=1)
    color = int(distances.argmin())
    contrast = max(float(np.linalg.norm(paints[color])), 1.0)  # white on paper has none
    own = float(bank.energy[fit.stencil]) * contrast**2
    here = errors[fit.y : fit.y + bank.window, fit.x : fit.x + bank.window]
    doubts = [
        wrong(here / contrast) / (WRONG * float(bank.area[fit.stencil])),
        _lopsided(canvas, fit, bank.window) / (_BITE * contrast),
        float(distances[color]) / TINT,
        fit.usurped / (_USURPED * own),
    ]
    if fit.left > _TOSS_UP_FROM * own:
        doubts.append(fit.left / (_TOSS_UP * fit.runner_up))
    look, guess = fit.stencil % ALL_LOOKS, None
    y, x = (fit.y - canvas.slack) / canvas.unit, (fit.x - canvas.slack) / canvas.unit
    if look < len(LOOKS):
        shape, fill = LOOKS[look]
        name = list(COLORS)[color]
        guess = Thing(shape=shape, color=name, size=fit.size, fill=fill, x=x, y=y)
    return Sighting(
        thing=guess if max(doubts) <= 1 else None,
        x=x,
        y=y,
        side=EXTENT[fit.size],
        doubt=max(doubts) if guess else np.inf,
        residual=fit.left / own,
    )


def _lopsided(canvas: Canvas, fit: Fit, window: int) -> float:
    """The largest error that neighbouring pixels have in common, in levels, beyond what noise explains."""
    rest = canvas.field[:, fit.y : fit.y + window, fit.x : fit.x + window]
    side = max(1, round(_BITE_SIDE * canvas.unit))
    means = np.stack([square_sums(channel, side) for channel in rest]) / side**2
    return float(np.sqrt((means**2).sum(0)).max()) - _NOISE_REACH * canvas.ground.noise**0.5 / side


def errors_of(rest: np.ndarray, noise: float) -> np.ndarray:
    """How far each pixel of `rest` [3, H, W] is off, in levels, beyond what noise explains."""
    errors = (np.sqrt((rest**2).sum(0)) - _NOISE_REACH * noise**0.5).clip(0)
    seam = rest.shape[2] // UNITS // 4  # decoders blur across the seam of the two panels
    errors[:seam] = errors[len(errors) - seam :] = 0
    return errors


def wrong(error: np.ndarray) -> float:
    """How many pixels are plainly wrong, given errors as shares of the contrast."""
    return float(((error - _FREE_ERROR) / (1 - _FREE_ERROR)).clip(0).sum())
