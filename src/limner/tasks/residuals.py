"""Residuals that no accepted object explains: strong ones, far off the background, and faint objects."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from limner.tasks.acceptance import Detection, pixel_errors
from limner.tasks.scenes import EXTENT, SIZES
from limner.tasks.template_matching import MIN_ENERGY_GAIN
from limner.tasks.templates import NUM_FORMS, SEARCH_BLUR, block, ring_width, square_sums, template_bank

_MAX_RESEMBLING_RESIDUAL = 0.3  # a rejected detection with a lower residual resembles an object
MIN_UNEXPLAINED_LEVELS = 40.0  # pixels with smaller errors do not count
_FULL_WEIGHT_LEVELS = 100.0  # pixels with this error count in full
_MIN_UNKNOWN_AREA = 14 / 16  # least weighted area within 3 x 3 units for an unknown, in square units
_MIN_FAINT_LEVELS = 12.0  # least tint of a detected faint object
_MIN_FAINT_SHARE = 0.5  # least share of its window's energy that it explains
_FAINT_NOISE_MULTIPLE = 12.0  # multiple of the noise energy to exceed; chance does so once in thousands of pictures


def with_unknowns(detections: list[Detection], residual: np.ndarray, noise: float, unit: int) -> tuple[Detection, ...]:
    """Replace rejected detections by unknowns, and drop those that are artifacts.

    An artifact neither resembles an object nor is large. `residual` [3, H, W] is the residual of all accepted fits.
    """
    kept = [d for d in detections if d.object is not None or d.residual < _MAX_RESEMBLING_RESIDUAL]
    weights = unexplained(residual, noise)
    ring = ring_width(unit)
    for d in kept:
        left, top, side = round(d.x * unit), round(d.y * unit), round(d.side * unit)
        block(weights, top - ring, left - ring, side + 2 * ring)[:] = 0
    while (patch := worst_patch(weights, unit)) is not None:
        y, x, side = patch
        block(weights, y - unit, x - unit, side + 2 * unit)[:] = 0
        box = {"x": x / unit, "y": y / unit, "side": side / unit}
        kept.append(Detection(object=None, doubt=np.inf, residual=np.inf, **box))
    return tuple(kept)


def unexplained(residual: np.ndarray, noise: float) -> np.ndarray:
    """Return the weight of each pixel of `residual` [3, H, W] as unexplained, float32 [H, W] in [0, 1]."""
    errors = pixel_errors(residual, noise)
    errors[errors < MIN_UNEXPLAINED_LEVELS] = 0
    return (errors / _FULL_WEIGHT_LEVELS).clip(max=1) ** 2


def worst_patch(weights: np.ndarray, unit: int) -> tuple[int, int, int] | None:
    """Return top, left and side of the 3 x 3 units with the largest sum; None if it is small."""
    side = 3 * unit
    patch = square_sums(weights, side)
    y, x = np.unravel_index(patch.argmax(), patch.shape)
    return (int(y), int(x), side) if patch[y, x] >= _MIN_UNKNOWN_AREA * unit**2 else None


def find_faint_object(residual: np.ndarray, known: Sequence[Detection], noise: float, unit: int) -> Detection | None:
    """Return the strongest faint object, of any tint, on `residual` [3, H, W] outside the boxes of `known`.

    The search for objects favors tints of the palette and misses it. Its pixels are too weak for `unexplained`.
    """
    pad, strongest = 2 * ring_width(unit), None
    # Noise clipped at 0 or 255 has a mean off its median, which would pass for a faint object.
    level = residual[:, (residual**2).sum(0) <= 9 * noise + 1]
    residual = residual - (level.mean(1)[:, None, None] if level.size else 0)
    energies = (residual**2).sum(0, dtype=np.float64) - noise
    for d in known:
        left, top, side = (round(v * unit) for v in (d.x, d.y, d.side))
        for values in (*residual, energies):
            block(values, top - ring_width(unit), left - ring_width(unit), side + 2 * ring_width(unit))[:] = 0
    energies = np.pad(energies, pad)
    field = np.pad(residual, ((0, 0), (pad, pad), (pad, pad)))
    least = MIN_ENERGY_GAIN * unit**2 + _FAINT_NOISE_MULTIPLE * noise
    for size in SIZES:
        bank = template_bank(size, unit)
        total = square_sums(energies, bank.window)
        ys, xs = np.nonzero(total >= least)
        if not len(ys):
            continue
        first = SEARCH_BLUR * NUM_FORMS
        templates, n = (values[first : first + NUM_FORMS] for values in (bank.templates, bank.energy))
        windows = sliding_window_view(field, (bank.window, bank.window), (1, 2))[:, ys, xs]
        inner = windows.reshape(3, len(ys), -1) @ templates.T  # [3, P, K]
        explained = (inner**2).sum(0) / n
        stands_out = (explained >= _MIN_FAINT_LEVELS**2 * n) & (explained >= _MIN_FAINT_SHARE * total[ys, xs, None])
        place, form = np.unravel_index(np.where(stands_out, explained, 0).argmax(), explained.shape)
        if stands_out[place, form] and explained[place, form] >= least:
            least = float(explained[place, form])
            unexplained_share = 1 - least / float(total[ys[place], xs[place]])
            y, x = ((int(at[place]) + ring_width(unit) - pad) / unit for at in (ys, xs))
            strongest = Detection(object=None, x=x, y=y, side=EXTENT[size], doubt=np.inf, residual=unexplained_share)
    return strongest
