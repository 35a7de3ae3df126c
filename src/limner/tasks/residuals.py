"""Residuals that no accepted object explains: strong ones, far off the background, and faint objects."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from limner.tasks.acceptance import Sighting, errors_of
from limner.tasks.scenes import EXTENT, SIZES
from limner.tasks.template_matching import FAINTEST
from limner.tasks.templates import ALL_LOOKS, SEARCH_BLUR, bank_of, block, ring_of, square_sums

_RESEMBLANCE = 0.3  # a rejected sighting with a lower residual resembles an object
DEBRIS_LEVELS = 40.0  # pixels with smaller errors do not count
_DEBRIS_FULL = 100.0  # pixels with this error count in full
_DEBRIS_AREA = 14 / 16  # least weighted area within 3 x 3 units for an unknown, in square units
_GHOST_LEVELS = 12.0  # least tint of a detected faint object
_GHOST_SHARE = 0.5  # least share of its window's energy that it explains
_GHOST_NOISE = 12.0  # multiple of the noise energy to exceed; chance does so once in thousands of pictures


def with_unknown(sightings: list[Sighting], rest: np.ndarray, noise: float, unit: int) -> tuple[Sighting, ...]:
    """Replace rejected sightings by unknowns, and drop those that are artifacts.

    An artifact neither resembles an object nor is large. `rest` [3, H, W] is the residual of all accepted fits.
    """
    seen = [s for s in sightings if s.thing is not None or s.residual < _RESEMBLANCE]
    off = debris(rest, noise)
    ring = ring_of(unit)
    for s in seen:
        left, top, side = round(s.x * unit), round(s.y * unit), round(s.side * unit)
        block(off, top - ring, left - ring, side + 2 * ring)[:] = 0
    while (patch := worst_patch(off, unit)) is not None:
        y, x, side = patch
        block(off, y - unit, x - unit, side + 2 * unit)[:] = 0
        box = {"x": x / unit, "y": y / unit, "side": side / unit}
        seen.append(Sighting(thing=None, doubt=np.inf, residual=np.inf, **box))
    return tuple(seen)


def debris(rest: np.ndarray, noise: float) -> np.ndarray:
    """Return the weight of each pixel of `rest` [3, H, W] as unexplained, float32 [H, W] in [0, 1]."""
    errors = errors_of(rest, noise)
    errors[errors < DEBRIS_LEVELS] = 0
    return (errors / _DEBRIS_FULL).clip(max=1) ** 2


def worst_patch(off: np.ndarray, unit: int) -> tuple[int, int, int] | None:
    """Return top, left and side of the 3 x 3 units with the largest sum; None if it is small."""
    side = 3 * unit
    patch = square_sums(off, side)
    y, x = np.unravel_index(patch.argmax(), patch.shape)
    return (int(y), int(x), side) if patch[y, x] >= _DEBRIS_AREA * unit**2 else None


def ghost_on(rest: np.ndarray, seen: Sequence[Sighting], noise: float, unit: int) -> Sighting | None:
    """Return the strongest faint object, of any tint, on `rest` [3, H, W] outside the boxes of `seen`, or None.

    The search for objects favors tints of the palette and misses it. Its pixels are too weak for `debris`.
    """
    pad, found = 2 * ring_of(unit), None
    # Noise clipped at 0 or 255 has a mean off its median, which would pass for a faint object.
    level = rest[:, (rest**2).sum(0) <= 9 * noise + 1]
    rest = rest - (level.mean(1)[:, None, None] if level.size else 0)
    energies = (rest**2).sum(0, dtype=np.float64) - noise
    for s in seen:
        left, top, side = (round(v * unit) for v in (s.x, s.y, s.side))
        for values in (*rest, energies):
            block(values, top - ring_of(unit), left - ring_of(unit), side + 2 * ring_of(unit))[:] = 0
    energies = np.pad(energies, pad)
    field = np.pad(rest, ((0, 0), (pad, pad), (pad, pad)))
    strongest = FAINTEST * unit**2 + _GHOST_NOISE * noise
    for size in SIZES:
        bank = bank_of(size, unit)
        total = square_sums(energies, bank.window)
        ys, xs = np.nonzero(total >= strongest)
        if not len(ys):
            continue
        first = SEARCH_BLUR * ALL_LOOKS
        stencils, n = (values[first : first + ALL_LOOKS] for values in (bank.stencils, bank.energy))
        windows = sliding_window_view(field, (bank.window, bank.window), (1, 2))[:, ys, xs]
        inner = windows.reshape(3, len(ys), -1) @ stencils.T  # [3, P, K]
        explained = (inner**2).sum(0) / n
        stands_out = (explained >= _GHOST_LEVELS**2 * n) & (explained >= _GHOST_SHARE * total[ys, xs, None])
        place, look = np.unravel_index(np.where(stands_out, explained, 0).argmax(), explained.shape)
        if stands_out[place, look] and explained[place, look] >= strongest:
            strongest = float(explained[place, look])
            residual = 1 - strongest / float(total[ys[place], xs[place]])
            y, x = ((int(at[place]) + ring_of(unit) - pad) / unit for at in (ys, xs))
            found = Sighting(thing=None, x=x, y=y, side=EXTENT[size], doubt=np.inf, residual=residual)
    return found
