"""Acceptance test of the scene parser: accept or reject a fitted object (see `scene_reader.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from limner.tasks.background import MAX_TINT_DISTANCE
from limner.tasks.scenes import COLORS, EXTENT, UNITS, SceneObject
from limner.tasks.template_matching import Canvas, Fit
from limner.tasks.templates import FORMS, NUM_FORMS, square_sums, template_bank

# Measured on degraded scenes and malformed objects: see the tests.
_TOLERATED_ERROR = 0.35  # share of the contrast: smaller errors of a pixel come from blur and compression
MAX_WRONG_SHARE = 0.07  # largest share of an object's area that may be clearly wrong
_MAX_RESIDUAL_RATIO = 0.92  # largest ratio of the residuals of the best and the second-best template
_MIN_AMBIGUOUS_RESIDUAL = 0.04  # the ratio applies if the residual exceeds this share of the energy
_MAX_RIVAL_GAIN = 0.012  # share of its energy: a half-opaque square is not a square of blurred stripes
_LOCAL_SIDE = 3 / 4  # side of the squares over which errors are averaged, in units
_MAX_LOCAL_ERROR = 0.45  # largest such average, as a share of the contrast
_NOISE_MULTIPLE = 1.3  # in root mean squares of noise: nine in ten noisy pixels are below


@dataclass(frozen=True, kw_only=True)
class Detection:
    """A detection in the box at `x`, `y` with `side`, in units.

    A rejected detection has `object=None`. `doubt` is 0 for an exact rendering, 1 at the limit of
    acceptance, and more beyond. `residual` is the share of the object's energy left unexplained
    (slightly negative under noise).
    """

    object: SceneObject | None
    x: float
    y: float
    side: float
    doubt: float
    residual: float


def assess_fit(canvas: Canvas, fit: Fit, errors: np.ndarray) -> Detection:
    """Accept or reject a fit, given the `errors` [H', W'] left by all fits together."""
    bank, paints = template_bank(fit.size, canvas.unit), canvas.background.paints
    distances = np.linalg.norm(paints - fit.tint, axis=1)
    color = int(distances.argmin())
    contrast = max(float(np.linalg.norm(paints[color])), 1.0)  # white on a white background has none
    energy = float(bank.energy[fit.template]) * contrast**2
    window_errors = errors[fit.y : fit.y + bank.window, fit.x : fit.x + bank.window]
    doubts = [
        wrong_pixels(window_errors / contrast) / (MAX_WRONG_SHARE * float(bank.area[fit.template])),
        _largest_local_bias(canvas, fit, bank.window) / (_MAX_LOCAL_ERROR * contrast),
        float(distances[color]) / MAX_TINT_DISTANCE,
        fit.rival_gain / (_MAX_RIVAL_GAIN * energy),
    ]
    if fit.residual > _MIN_AMBIGUOUS_RESIDUAL * energy:
        doubts.append(fit.residual / (_MAX_RESIDUAL_RATIO * fit.runner_up))
    form, candidate = fit.template % NUM_FORMS, None
    y, x = (fit.y - canvas.slack) / canvas.unit, (fit.x - canvas.slack) / canvas.unit
    if form < len(FORMS):
        shape, fill = FORMS[form]
        name = list(COLORS)[color]
        candidate = SceneObject(shape=shape, color=name, size=fit.size, fill=fill, x=x, y=y)
    return Detection(
        object=candidate if max(doubts) <= 1 else None,
        x=x,
        y=y,
        side=EXTENT[fit.size],
        doubt=max(doubts) if candidate else np.inf,
        residual=fit.residual / energy,
    )


def _largest_local_bias(canvas: Canvas, fit: Fit, window: int) -> float:
    """Return the largest mean error over a square of pixels, in levels, less that of noise."""
    residual = canvas.field[:, fit.y : fit.y + window, fit.x : fit.x + window]
    side = max(1, round(_LOCAL_SIDE * canvas.unit))
    means = np.stack([square_sums(channel, side) for channel in residual]) / side**2
    return float(np.sqrt((means**2).sum(0)).max()) - _NOISE_MULTIPLE * canvas.background.noise**0.5 / side


def pixel_errors(residual: np.ndarray, noise: float) -> np.ndarray:
    """Return the error of each pixel of `residual` [3, H, W], in levels, less that of noise."""
    errors = (np.sqrt((residual**2).sum(0)) - _NOISE_MULTIPLE * noise**0.5).clip(0)
    seam = residual.shape[2] // UNITS // 4  # decoders blur the border of the two panels
    errors[:seam] = errors[len(errors) - seam :] = 0
    return errors


def wrong_pixels(error: np.ndarray) -> float:
    """Return the number of clearly wrong pixels (weighted), given errors as shares of the contrast."""
    return float(((error - _TOLERATED_ERROR) / (1 - _TOLERATED_ERROR)).clip(0).sum())
