"""Acceptance test of the scene parser: accept or reject a fitted object (see `scene_reader.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from limner.tasks.background import TINT
from limner.tasks.scenes import COLORS, EXTENT, UNITS, Thing
from limner.tasks.template_matching import Canvas, Fit
from limner.tasks.templates import ALL_LOOKS, LOOKS, bank_of, square_sums

# Measured on degraded scenes and malformed objects: see the tests.
_FREE_ERROR = 0.35  # share of the contrast: errors of a pixel from blur and compression
WRONG = 0.07  # largest share of an object's area that may be clearly wrong
_TOSS_UP = 0.92  # largest ratio of the residuals of the best and the second-best look
_TOSS_UP_FROM = 0.04  # the ratio applies if the residual exceeds this share of the energy
_USURPED = 0.012  # share of its energy: a half-opaque square is not a square of blurred stripes
_BITE_SIDE = 3 / 4  # side of the squares over which errors are averaged, in units
_BITE = 0.45  # largest such average, as a share of the contrast
_NOISE_REACH = 1.3  # in root mean squares of noise: nine in ten noisy pixels are below


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """A detection in the box at `x`, `y` with `side`, in units.

    A rejected detection has `thing=None`. `doubt` is 0 for an exact rendering, 1 at the limit of
    acceptance, and more beyond. `residual` is the share of the object's energy left unexplained
    (slightly negative under noise).
    """

    thing: Thing | None
    x: float
    y: float
    side: float
    doubt: float
    residual: float


def weigh(canvas: Canvas, fit: Fit, errors: np.ndarray) -> Sighting:
    """Accept or reject a fit, given the `errors` [H', W'] left by all fits together."""
    bank, paints = bank_of(fit.size, canvas.unit), canvas.ground.paints
    distances = np.linalg.norm(paints - fit.tint, axis=1)
    color = int(distances.argmin())
    contrast = max(float(np.linalg.norm(paints[color])), 1.0)  # white on a white background has none
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
    """Return the largest mean error over a square of pixels, in levels, less that of noise."""
    rest = canvas.field[:, fit.y : fit.y + window, fit.x : fit.x + window]
    side = max(1, round(_BITE_SIDE * canvas.unit))
    means = np.stack([square_sums(channel, side) for channel in rest]) / side**2
    return float(np.sqrt((means**2).sum(0)).max()) - _NOISE_REACH * canvas.ground.noise**0.5 / side


def errors_of(rest: np.ndarray, noise: float) -> np.ndarray:
    """Return the error of each pixel of `rest` [3, H, W], in levels, less that of noise."""
    errors = (np.sqrt((rest**2).sum(0)) - _NOISE_REACH * noise**0.5).clip(0)
    seam = rest.shape[2] // UNITS // 4  # decoders blur the border of the two panels
    errors[:seam] = errors[len(errors) - seam :] = 0
    return errors


def wrong(error: np.ndarray) -> float:
    """Return the number of clearly wrong pixels (weighted), given errors as shares of the contrast."""
    return float(((error - _FREE_ERROR) / (1 - _FREE_ERROR)).clip(0).sum())
