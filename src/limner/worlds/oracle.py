"""Reads a picture of the synthetic world back into a `Scene`, without a learned model.

Analysis by synthesis. A picture of the world is a flat background plus, for every thing, its opacity
stencil times the difference of two paints. To read it is to search for the few (shape, fill, size,
color, place) that leave the least squared error:

1. *Background*: the paint that most pixels come near; their median gives its exact levels here, so
   that a colour cast cancels. `D = picture - background` is what there is to explain.
2. *Search*: every stencil is laid on every half unit. A stencil `t` with `n = |t|^2` explains most
   with the tint `T / n` where `T = <t, D>`, namely `|T|^2 / n` of the energy in its window. Places
   are taken greedily by energy explained minus energy left over, *including* a ring of half a unit
   around the box: four small squares must not pass for a large one.
3. *Refinement*: around each place all stencils, sharp and blurred (a decoder's edges are soft), at
   every pixel; what is explained is subtracted, and its neighbours are fitted to the rest.
4. *Doubt*: a thing is believed if few of its pixels are plainly wrong, nowhere are many of them off
   together (a bite), its tint is near the palette and no other look does as well. Wherever much is left
   that no believed thing explains, be it faint (a ghost), the reading holds something *unknown*, and such
   a picture keeps no caption's promise: a score must not flatter.

What counts as wrong is chosen with care. Blur, noise and compression leave small errors everywhere and
of either sign; a malformed thing leaves full-contrast errors in places, so single errors below a third of
the contrast are free. A ghost is too faint for single pixels to tell: it is found by its shape, in
whatever tint, where the average over a stencil stands out of the noise.

The price, what is still taken for right: an octagon for a circle; things with a bite, a notch or a bump
of less than about half of a square of 3/4 units (1/20 of a small solid circle, 1/60 of a large one), and
once in a few hundred times a small diamond without a corner, as a diamond a little beside it;
ghosts whose tint is less than 12 levels off the background (root of the sum of squares over channels;
up to 25 for small outlines and stripes), and ghosts mostly behind or within half a unit of a thing.

Pictures are uint8 [H, W, 3], `W` a multiple of 12, `H` equal to `W` or (a panel of a pair) half of
it. Those wider than 48 pixels are averaged down to 48 first. In the code below: `P` places, `K`
stencils, `w` pixels along a window, `C` colors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from limner.data.augment import area_weights
from limner.worlds.rendering import render, stencil, transform_panel
from limner.worlds.scenes import (
    BACKGROUNDS,
    COLORS,
    EXTENT,
    FILLS,
    PAPER,
    SHAPES,
    SIZES,
    UNITS,
    Fill,
    Pair,
    Scene,
    Shape,
    Size,
    Thing,
    Transform,
)

FINEST = 48  # pixels; wider pictures are averaged down to this
_LOOKS: tuple[tuple[Shape, Fill], ...] = tuple(product(SHAPES, FILLS))
_PALETTE = np.array(list(COLORS.values()), np.float32)  # [C, 3]
_BLURS = (0.0, 0.6, 0.9, 1.2)  # sigma of the softened stencils, in quarters of a unit
_SEARCH_BLUR = 2  # the one used to find places
_FAINTEST = 750.0  # least excess of energy explained over energy left, in levels^2 per pixel x unit
_MIDDLE = 4  # units; the side of things that are neither small nor large
_ALL_LOOKS = len(_LOOKS) + len(SHAPES)  # ... which come after the true ones
_MOST_THINGS = 12
_PALETTE_PULL = 0.5  # how much of the distance from a tint to the palette counts as error

# When a thing is believed. Measured on degraded scenes and on malformed things: see the tests.
_FREE_ERROR = 0.35  # of the contrast: what blur and compression may do to a pixel
_WRONG = 0.07  # largest share of a thing's area that may be plainly wrong
_TINT = 45.0  # levels; farthest a tint may be from its palette color (the closest two are 92 apart)
_TOSS_UP = 0.92  # residual of the best look over that of the second best
_TOSS_UP_FROM = 0.08  # ... which matters only where the residual is at least this share of energy
_USURPED = 0.012  # of its energy: a half-opaque square is not a square of blurred stripes
_BITE_SIDE = 3 / 4  # units; of the squares over which a thing's errors are averaged
_BITE = 0.45  # of the contrast: largest such average
_NOISE_REACH = 1.3  # root mean squares of noise: nine in ten noisy pixels are nearer than this
# When something is seen that no stencil explains.
_RESEMBLANCE = 0.3  # residual of what is not believed, but alike enough to be no artefact
_DEBRIS_LEVELS = 40.0  # a pixel that is less off than this is not debris
_DEBRIS_FULL = 100.0  # a pixel that is this much off counts in full
_DEBRIS_AREA = 14 / 16  # square units of debris within 3 x 3 units that make a thing
_GHOST_LEVELS = 12.0  # least tint of a faint thing that is seen
_GHOST_SHARE = 0.5  # least share of the energy around it that it explains
_GHOST_NOISE = 12.0  # energies of noise that it stands out by: by chance, once in thousands of pictures


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """Something seen in the box at `x`, `y` with `side`, in units.

    `thing` is None if what is there is no thing of this world; `guess` is then the nearest one, if
    any. `doubt` grows from 0 (as rendered) to 1 (barely believed) and beyond. `residual` is the
    energy left unexplained, as a share of the thing's own (slightly negative under noise).
    """

    thing: Thing | None
    guess: Thing | None
    x: float
    y: float
    side: float
    doubt: float
    residual: float


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a picture shows: a background (None if of no known paint) and what was seen on it."""

    background: str | None
    sightings: tuple[Sighting, ...]
    height: int = UNITS

    @property
    def things(self) -> tuple[Thing, ...]:
        """Everything believed."""
        return tuple(s.thing for s in self.sightings if s.thing is not None)

    @property
    def scene(self) -> Scene | None:
        """The scene, or None if anything in the picture is unknown."""
        if self.background is None or len(self.things) < len(self.sightings):
            return None
        return Scene(things=self.things, background=self.background, height=self.height)


def read(picture: np.ndarray, *, backgrounds: Sequence[str] = tuple(BACKGROUNDS)) -> Reading:
    """Read uint8 [H, W, 3]; `backgrounds` are the paints that may lie behind the things.

    Raises ValueError if the picture is not that of a scene or of a panel (see the module's text).
    """
    pixels, unit = _as_pixels(picture)
    height = len(pixels) // unit
    first: Reading | None = None
    # Stripes a pixel off the half-unit grid are found only by the finer search.
    row_steps = dict.fromkeys((max(1, unit // 2), 1))
    for row_step, ground in product(row_steps, _grounds(pixels, backgrounds)):
        sightings = _see(pixels, ground, unit, row_step)
        reading = Reading(background=ground.name, sightings=sightings, height=height)
        if reading.scene is not None:
            return reading
        first = first or reading
    return first or Reading(background=None, sightings=(), height=height)


def _as_pixels(picture: np.ndarray) -> tuple[np.ndarray, int]:
    """float32 [H, W, 3] with W <= 48, and pixels a unit."""
    h, w = picture.shape[:2]
    if picture.ndim != 3 or picture.shape[2] != 3 or w % UNITS or h not in (w, w // 2):
        raise ValueError(f"picture has shape {picture.shape}, not [12 n, 12 n, 3] or [6 n, 12 n, 3]")
    pixels = picture.astype(np.float32)
    if w > FINEST:
        down, across = _area_weights(h, FINEST * h // w), _area_weights(w, FINEST)
        pixels = (across @ (down @ pixels.reshape(h, -1)).reshape(-1, w, 3)).astype(np.float32)
    return pixels, pixels.shape[1] // UNITS


@lru_cache(maxsize=16)
def _area_weights(old: int, new: int) -> np.ndarray:
    """The matrix of area averaging, float32 [new, old]."""
    return area_weights(old, new).astype(np.float32)


@dataclass(frozen=True)
class _Ground:
    name: str
    level: np.ndarray  # [3]
    paints: np.ndarray  # [C, 3], the palette as differences from `level`
    noise: float  # energy of noise per pixel


def _grounds(pixels: np.ndarray, names: Sequence[str]) -> Iterator[_Ground]:
    """The paints that may be the background, most frequent first."""
    grounds = np.array([BACKGROUNDS.get(n) or COLORS[n] for n in names], np.float32)
    paints = np.concatenate([grounds, _PALETTE])
    flat = pixels.reshape(-1, 3)
    nearest = ((paints**2).sum(1) - 2 * flat @ paints.T).argmin(1)
    counts = np.bincount(nearest, minlength=len(paints))[: len(names)]
    for k in np.argsort(-counts, kind="stable"):
        if counts[k] < 0.2 * len(flat):
            return
        mine = flat[nearest == k]
        level = np.median(mine, 0)
        cast = level - grounds[k]
        if cast @ cast > _TINT**2:
            continue
        # 1.48 x the median absolute deviation is the sigma of Gaussian noise.
        noise = float(((1.4826 * np.median(abs(mine - level), 0)) ** 2).sum())
        yield _Ground(names[int(k)], level, np.clip(_PALETTE + cast, 0, 255) - level, noise)


@dataclass(frozen=True)
class _Bank:
    """The stencils of one size, in windows that hold the box and the ring around it.

    After those of the looks come "strangers", solid shapes between small and large: they belong to
    no scene, but without them a circle of four units would pass for a large diamond.
    """

    side: int  # of the box, in pixels
    window: int  # w
    stencils: np.ndarray  # float32 [K, w * w], K = blurs x looks
    energy: np.ndarray  # float32 [K]
    area: np.ndarray  # float32 [K]


@lru_cache(maxsize=8)
def _bank(size: Size, unit: int) -> _Bank:
    ring = _ring(unit)
    w = EXTENT[size] * unit + 2 * ring
    known = [stencil(shape, size, fill, unit) for shape, fill in _LOOKS]
    shrink = _area_weights(EXTENT["large"] * unit, _MIDDLE * unit)
    strangers = [shrink @ stencil(s, "large", "solid", unit) @ shrink.T for s in SHAPES]
    margins = [(w - len(s)) // 2 for s in known + strangers]
    sharp = np.stack([np.pad(s, (m, w - len(s) - m)) for s, m in zip(known + strangers, margins, strict=True)])
    distance = np.subtract.outer(np.arange(w), np.arange(w))
    soft = [sharp]
    for sigma in _BLURS[1:]:
        kernel = np.exp(-0.5 * (distance / (sigma * unit / 4)) ** 2)
        kernel /= kernel[w // 2].sum()
        soft.append(kernel @ sharp @ kernel)
    stencils = np.concatenate(soft).reshape(-1, w * w).astype(np.float32)
    return _Bank(w - 2 * ring, w, stencils, (stencils**2).sum(1), stencils.sum(1))


def _ring(unit: int) -> int:
    return (unit + 1) // 2


@dataclass(frozen=True)
class _Match:
    """How well stencils explain windows. Energies are net of what noise contributes."""

    inner: np.ndarray  # [3, P, K], T
    left: np.ndarray  # [P, K], energy left over
    left_free: np.ndarray  # [P, K], the same if the tint need not be near the palette
    total: np.ndarray  # [P], energy in the window


@dataclass(frozen=True)
class _Fit:
    """The best stencil near a place; `y`, `x` are the corner of its window in the padded field."""

    size: Size
    y: int
    x: int
    stencil: int
    tint: np.ndarray  # [3], a difference from the background
    left: float  # energy left over
    runner_up: float  # the same for the second-best look
    usurped: float  # energy that another look would explain besides, in a tint off the palette


class _Canvas:
    """What is left to explain: `field` [3, H', W'], padded so that boxes may lie a little outside."""

    def __init__(self, pixels: np.ndarray, ground: _Ground, unit: int) -> None:
        self.unit, self.ground, self.slack = unit, ground, _ring(unit)
        self.pad = self.slack + _ring(unit)
        self.height, self.width = pixels.shape[:2]
        around = ((0, 0), (self.pad, self.pad), (self.pad, self.pad))
        self.field = np.pad((pixels - ground.level).transpose(2, 0, 1), around)

    @property
    def rest(self) -> np.ndarray:
        """The field inside the frame, [3, H, W]."""
        return self.field[:, self.pad : -self.pad, self.pad : -self.pad]

    def energy(self, window: int) -> np.ndarray:
        """Of all windows [H' - w + 1, W' - w + 1], net of what noise contributes."""
        energy = (self.field**2).sum(0, dtype=np.float64)
        energy[self.pad : -self.pad, self.pad : -self.pad] -= self.ground.noise
        return _square_sums(energy, window)

    def match(self, bank: _Bank, ys: np.ndarray, xs: np.ndarray, which: slice) -> _Match:
        """Lay stencils `which` on the windows with their corners at `ys`, `xs`, each [P]."""
        views = sliding_window_view(self.field, (bank.window, bank.window), (1, 2))
        windows = views[:, ys, xs].reshape(3, -1, bank.window**2)
        inner = windows @ bank.stencils[which].T
        energy, paints = bank.energy[which], self.ground.paints
        free = (inner**2).sum(0) / energy
        # With the tint held to color c: 2 <T, c> - n |c|^2.
        held = np.tensordot(2 * paints, inner, 1) - (paints**2).sum(1)[:, None, None] * energy
        gain = free + _PALETTE_PULL * (held.max(0) - free)
        total = self.energy(bank.window)[ys, xs]
        return _Match(
            inner=inner,
            left=total[:, None] - gain,
            left_free=total[:, None] - free,
            total=total,
        )

    def places(self, row_step: int) -> list[tuple[Size, int, int]]:
        """Where things of which size may be: corners of windows, the best first."""
        steps = row_step, max(1, self.unit // 2)
        first = _SEARCH_BLUR * _ALL_LOOKS
        least = _FAINTEST * self.unit**2
        values: dict[Size, np.ndarray] = {}
        for size in SIZES:
            bank = _bank(size, self.unit)
            energy = self.energy(bank.window)[:: steps[0], :: steps[1]]
            i, j = np.nonzero(energy >= least)
            match = self.match(bank, steps[0] * i, steps[1] * j, slice(first, first + len(_LOOKS)))
            values[size] = np.full(energy.shape, -np.inf)
            values[size][i, j] = match.total - 2 * match.left.min(1)
        found: list[tuple[Size, int, int]] = []
        while len(found) < _MOST_THINGS:
            size = max(SIZES, key=lambda s: values[s].max())
            i, j = np.unravel_index(values[size].argmax(), values[size].shape)
            if values[size][i, j] < least:
                break
            y, x = int(i) * steps[0], int(j) * steps[1]
            found.append((size, y, x))
            for other, value in values.items():  # no two things overlap by more than a pixel
                ys, xs = (step * np.arange(n) for step, n in zip(steps, value.shape, strict=True))
                mine, its = _bank(size, self.unit).side - 1, _bank(other, self.unit).side - 1
                taken = (ys < y + mine) & (y < ys + its), (xs < x + mine) & (x < xs + its)
                value[np.ix_(*taken)] = -np.inf
        return found

    def fit(self, size: Size, y: int, x: int) -> _Fit:
        """The best of all stencils of a size within half a unit of a place."""
        bank, reach = _bank(size, self.unit), _ring(self.unit)
        ys, xs = (
            np.arange(max(0, at - reach), min(at + reach, length - bank.window) + 1)
            for at, length in zip((y, x), self.field.shape[1:], strict=True)
        )
        ys, xs = np.repeat(ys, len(xs)), np.tile(xs, len(ys))
        match = self.match(bank, ys, xs, slice(None))
        place, best = np.unravel_index(match.left.argmin(), match.left.shape)
        look = best % _ALL_LOOKS
        by_look = match.left.min(0).reshape(len(_BLURS), -1).min(0)
        by_look_free = match.left_free.min(0).reshape(len(_BLURS), -1).min(0)
        return _Fit(
            size=size,
            y=int(ys[place]),
            x=int(xs[place]),
            stencil=int(best),
            tint=match.inner[:, place, best] / bank.energy[best],
            left=float(match.left[place, best]),
            runner_up=float(np.delete(by_look, look).min()),
            usurped=float(by_look_free[look] - np.delete(by_look_free, look).min()),
        )

    def add(self, fit: _Fit, sign: int) -> None:
        """Paint a fitted thing onto the field, or take it away."""
        bank = _bank(fit.size, self.unit)
        stencil = bank.stencils[fit.stencil].reshape(bank.window, bank.window)
        window = self.field[:, fit.y : fit.y + bank.window, fit.x : fit.x + bank.window]
        window += sign * fit.tint[:, None, None] * stencil

    def judge(self, fit: _Fit, errors: np.ndarray) -> Sighting:
        """Whether a fit is believed, given the `errors` [H', W'] that all fits together leave."""
        bank, paints = _bank(fit.size, self.unit), self.ground.paints
        distances = np.linalg.norm(paints - fit.tint, axis=1)
        color = int(distances.argmin())
        contrast = max(float(np.linalg.norm(paints[color])), 1.0)  # white on paper has none
        own = float(bank.energy[fit.stencil]) * contrast**2
        here = errors[fit.y : fit.y + bank.window, fit.x : fit.x + bank.window]
        doubts = [
            _wrong(here / contrast) / (_WRONG * float(bank.area[fit.stencil])),
            self._lopsided(fit, bank.window) / (_BITE * contrast),
            float(distances[color]) / _TINT,
            fit.usurped / (_USURPED * own),
        ]
        if fit.left > _TOSS_UP_FROM * own:
            doubts.append(fit.left / (_TOSS_UP * fit.runner_up))
        look, guess = fit.stencil % _ALL_LOOKS, None
        y, x = (fit.y - self.slack) / self.unit, (fit.x - self.slack) / self.unit
        if look < len(_LOOKS):
            shape, fill = _LOOKS[look]
            name = list(COLORS)[color]
            guess = Thing(shape=shape, color=name, size=fit.size, fill=fill, x=x, y=y)
        return Sighting(
            thing=guess if max(doubts) <= 1 else None,
            guess=guess,
            x=x,
            y=y,
            side=EXTENT[fit.size],
            doubt=max(doubts) if guess else np.inf,
            residual=fit.left / own,
        )

    def _lopsided(self, fit: _Fit, window: int) -> float:
        """The largest error that neighbouring pixels have in common, in levels, beyond what noise explains."""
        rest = self.field[:, fit.y : fit.y + window, fit.x : fit.x + window]
        side = max(1, round(_BITE_SIDE * self.unit))
        means = np.stack([_square_sums(channel, side) for channel in rest]) / side**2
        return float(np.sqrt((means**2).sum(0)).max()) - _NOISE_REACH * self.ground.noise**0.5 / side


def _see(pixels: np.ndarray, ground: _Ground, unit: int, row_step: int) -> tuple[Sighting, ...]:
    canvas = _Canvas(pixels, ground, unit)
    fits = []
    for place in canvas.places(row_step):
        fits.append(canvas.fit(*place))
        canvas.add(fits[-1], -1)
    errors = np.pad(_errors(canvas.rest, ground.noise), canvas.pad)
    sightings = []
    for fit in fits:
        sighting = canvas.judge(fit, errors)
        if sighting.thing is None:
            canvas.add(fit, +1)
        if sighting.thing is not None or np.linalg.norm(fit.tint) >= _DEBRIS_LEVELS:
            sightings.append(sighting)
    seen = _with_unknown(sightings, canvas.rest, ground.noise, unit)
    if all(s.thing is not None for s in seen) and (ghost := _ghost(canvas.rest, seen, ground.noise, unit)):
        seen = (*seen, ghost)
    return seen


def _with_unknown(sightings: list[Sighting], rest: np.ndarray, noise: float, unit: int) -> tuple[Sighting, ...]:
    """Replace what is not believed by unknowns, if it is more than an artefact.

    An artefact is neither alike to any thing nor large; `rest` [3, H, W] is what nothing explains.
    """
    seen = [s for s in sightings if s.thing is not None or s.residual < _RESEMBLANCE]
    off = _debris(rest, noise)
    ring = _ring(unit)
    for s in seen:
        left, top, side = round(s.x * unit), round(s.y * unit), round(s.side * unit)
        _block(off, top - ring, left - ring, side + 2 * ring)[:] = 0
    while (patch := _worst_patch(off, unit)) is not None:
        y, x, side = patch
        _block(off, y - unit, x - unit, side + 2 * unit)[:] = 0
        box = {"x": x / unit, "y": y / unit, "side": side / unit}
        seen.append(Sighting(thing=None, guess=None, doubt=np.inf, residual=np.inf, **box))
    return tuple(seen)


def _ghost(rest: np.ndarray, seen: Sequence[Sighting], noise: float, unit: int) -> Sighting | None:
    """The strongest faint thing on `rest` [3, H, W] away from what is `seen`: of any tint, also one off the palette.

    The search for things holds tints to the palette and never finds it, and no pixel of it counts as debris.
    """
    pad, found = 2 * _ring(unit), None
    # Noise that is cut off at 0 or 255 has a mean off its median, which would pass for a faint thing.
    level = rest[:, (rest**2).sum(0) <= 9 * noise + 1]
    rest = rest - (level.mean(1)[:, None, None] if level.size else 0)
    energies = (rest**2).sum(0, dtype=np.float64) - noise
    for s in seen:
        left, top, side = (round(v * unit) for v in (s.x, s.y, s.side))
        for values in (*rest, energies):
            _block(values, top - _ring(unit), left - _ring(unit), side + 2 * _ring(unit))[:] = 0
    energies = np.pad(energies, pad)
    field = np.pad(rest, ((0, 0), (pad, pad), (pad, pad)))
    strongest = _FAINTEST * unit**2 + _GHOST_NOISE * noise
    for size in SIZES:
        bank = _bank(size, unit)
        total = _square_sums(energies, bank.window)
        ys, xs = np.nonzero(total >= strongest)
        if not len(ys):
            continue
        first = _SEARCH_BLUR * _ALL_LOOKS
        stencils, n = (values[first : first + _ALL_LOOKS] for values in (bank.stencils, bank.energy))
        windows = sliding_window_view(field, (bank.window, bank.window), (1, 2))[:, ys, xs]
        inner = windows.reshape(3, len(ys), -1) @ stencils.T  # [3, P, K]
        explained = (inner**2).sum(0) / n
        stands_out = (explained >= _GHOST_LEVELS**2 * n) & (explained >= _GHOST_SHARE * total[ys, xs, None])
        place, look = np.unravel_index(np.where(stands_out, explained, 0).argmax(), explained.shape)
        if stands_out[place, look] and explained[place, look] >= strongest:
            strongest = float(explained[place, look])
            residual = 1 - strongest / float(total[ys[place], xs[place]])
            y, x = ((int(at[place]) + _ring(unit) - pad) / unit for at in (ys, xs))
            found = Sighting(thing=None, guess=None, x=x, y=y, side=EXTENT[size], doubt=np.inf, residual=residual)
    return found


def _errors(rest: np.ndarray, noise: float) -> np.ndarray:
    """How far each pixel of `rest` [3, H, W] is off, in levels, beyond what noise explains."""
    errors = (np.sqrt((rest**2).sum(0)) - _NOISE_REACH * noise**0.5).clip(0)
    seam = rest.shape[2] // UNITS // 4  # decoders blur across the seam of the two panels
    errors[:seam] = errors[len(errors) - seam :] = 0
    return errors


def _wrong(error: np.ndarray) -> float:
    """How many pixels are plainly wrong, given errors as shares of the contrast."""
    return float(((error - _FREE_ERROR) / (1 - _FREE_ERROR)).clip(0).sum())


def _debris(rest: np.ndarray, noise: float) -> np.ndarray:
    """How much each pixel of `rest` [3, H, W] counts as something, float32 [H, W] in [0, 1]."""
    errors = _errors(rest, noise)
    errors[errors < _DEBRIS_LEVELS] = 0
    return (errors / _DEBRIS_FULL).clip(max=1) ** 2


def _worst_patch(off: np.ndarray, unit: int) -> tuple[int, int, int] | None:
    """Top, left and side of the 3 x 3 units with the most debris, if that is much."""
    side = 3 * unit
    patch = _square_sums(off, side)
    y, x = np.unravel_index(patch.argmax(), patch.shape)
    return (int(y), int(x), side) if patch[y, x] >= _DEBRIS_AREA * unit**2 else None


def _square_sums(values: np.ndarray, side: int) -> np.ndarray:
    """Sums of [H, W] over all squares, [H - side + 1, W - side + 1]."""
    sums = np.pad(values.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    return sums[side:, side:] - sums[:-side, side:] - sums[side:, :-side] + sums[:-side, :-side]


def _block(field: np.ndarray, top: int, left: int, side: int) -> np.ndarray:
    """The part of a square that lies on `field` [H, W], as a view."""
    return field[max(0, top) : max(0, top + side), max(0, left) : max(0, left + side)]


def read_pair(picture: np.ndarray, transform: Transform | None = None) -> tuple[Reading, Reading]:
    """Read the two panels of uint8 [H, H, 3]: top, bottom.

    Given "upside down", the bottom is turned back before it is read; "grayscale" panels show paints
    outside the palette, so that their reading says little (`is_gray_of` compares pixels instead).
    """
    pixels, _ = _as_pixels(picture)
    half = len(pixels) // 2
    top, bottom = pixels[:half], pixels[half:]
    paints = (*BACKGROUNDS, PAPER)
    turned = bottom[::-1] if transform == "upside down" else bottom
    return read(top), read(turned, backgrounds=paints)


def is_gray_of(picture: np.ndarray, top: Scene) -> bool:
    """Whether the bottom panel of uint8 [H, H, 3] is the luma of the top one as drawn, whose reading is `top`.

    Things may all but vanish in gray (an orange one on gray), so that no stencil would find them.
    """
    pixels, unit = _as_pixels(picture)
    upper, lower = np.split(pixels, 2)
    pair = Pair(top=top, transform="grayscale")
    gray = transform_panel(pair, upper, pixels.shape[1]).astype(np.float32)
    rest = (lower - gray).transpose(2, 0, 1)
    cast = np.median(rest, (1, 2), keepdims=True)
    if np.linalg.norm(cast) > _DEBRIS_LEVELS:
        return False
    rest -= cast
    noise = float(((1.4826 * np.median(abs(rest), (1, 2))) ** 2).sum())
    if _worst_patch(_debris(rest, noise), unit) is not None:
        return False
    if _ghost(rest, (), noise, unit):
        return False
    error, ring = _errors(rest, noise), _ring(unit)
    clean = transform_panel(pair, render(top, pixels.shape[1]), pixels.shape[1])
    for thing in top.things:
        left, up, side = (round(v * unit) for v in (thing.x, thing.y, EXTENT[thing.size]))
        box = (up - ring, left - ring, side + 2 * ring)
        levels = _block(clean[..., 0], *box).astype(np.float32)
        contrast = max(3**0.5 * float(np.ptp(levels)), _DEBRIS_LEVELS)
        area = stencil(thing.shape, thing.size, thing.fill, unit).sum()
        if _wrong(_block(error, *box) / contrast) > _WRONG * area:
            return False
    return True
