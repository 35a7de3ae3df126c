"""Scene parser: reads a picture of the synthetic scenes into a `Scene`, without a learned model.

Analysis by synthesis. A synthetic picture is a flat background plus, for every object, its alpha mask times
the difference of two paints. Parsing searches for the few (shape, fill, size, color, position) that leave
the least squared error:

1. *Background*: the paint that is nearest to most pixels. Their median is the level of the background, so a color
   cast cancels. `D = picture - background` remains to be explained.
2. *Search* (`template_matching.py`): every template is tried at every half unit. A template `t` with `n = |t|^2`
   explains most with the tint `T / n` where `T = <t, D>`, namely `|T|^2 / n` of the energy in its window. Positions
   are chosen greedily by energy explained minus energy left over, *including* a ring of half a unit around the box:
   four small squares must not pass for a large one.
3. *Refinement*: all templates, sharp and blurred (a decoder's edges are soft), at every pixel around each position.
   The best fit is subtracted before the next position is fitted.
4. *Acceptance*: an object is accepted if few of its pixels are clearly wrong, no patch of pixels shares a large
   error (a bite), its tint is near the palette and no other template fits as well.
5. *Residual*: a large residual outside accepted objects, strong or faint, makes the picture *unknown*. An unknown
   picture matches no caption, which can only lower a score. The false acceptances below can raise it.

Blur, noise and compression leave small errors everywhere, of either sign. A malformed object leaves local errors
of full contrast. So single errors below a third of the contrast are free. Single pixels of a faint object are too weak
to count. It is detected by its shape, in any tint, if the average over a template exceeds the noise.

Known false acceptances: an octagon for a circle; objects with a bite, a notch or a bump of less than about
half of a square of 3/4 units (1/20 of a small solid circle, 1/60 of a large one); once in a few hundred times
a small diamond without a corner, as one shifted a little; faint objects whose tint is less than 12 levels off
the background (root of the sum of squares over channels; up to 25 for small outlines and stripes); and faint
objects mostly behind or within half a unit of another object.

Pictures are uint8 [H, W, 3], `W` a multiple of 12, `H` equal to `W` or (a panel of a pair) half of it.
Area averaging reduces pictures wider than 48 pixels to 48 first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from limner.data.area_resize import area_weights
from limner.tasks import template_matching
from limner.tasks.scenes import BACKGROUNDS, COLORS, EXTENT, SIZES, UNITS, Scene, SceneObject
from limner.tasks.template_matching import SEARCH_TEMPLATES, Canvas, Fit, ring_width, square_sums, template_bank

MAX_PIXELS_WIDE = 48  # pixels; wider pictures are averaged down to this
_PALETTE = np.array(list(COLORS.values()), np.float32)  # [C, 3]
_MIN_BACKGROUND_SHARE = 0.2  # of pixels nearest to a paint, for a background
_MAX_TINT_DISTANCE = 45.0  # of a tint from its palette color, in levels (the closest two are 92 apart)

# Measured on degraded scenes and malformed objects: see the tests.
_TOLERATED_ERROR = 0.35  # share of the contrast: smaller errors of a pixel come from blur and compression
MAX_WRONG_SHARE = 0.07  # largest share of an object's area that may be clearly wrong
_MAX_RESIDUAL_RATIO = 0.92  # largest ratio of the residuals of the best and the second-best template
_MIN_AMBIGUOUS_RESIDUAL = 0.04  # the ratio applies if the residual exceeds this share of the energy
_MAX_RIVAL_GAIN = 0.012  # share of its energy: a half-opaque square is not a square of blurred stripes
_LOCAL_SIDE = 3 / 4  # side of the squares over which errors are averaged, in units
_MAX_LOCAL_ERROR = 0.45  # largest such average, as a share of the contrast
_NOISE_MULTIPLE = 1.3  # in root mean squares of noise: nine in ten noisy pixels are below
_MAX_RESEMBLING_RESIDUAL = 0.3  # share of the energy; a rejected fit with less left over resembles an object
MIN_UNEXPLAINED_LEVELS = 40.0  # pixels with smaller errors do not count
_FULL_WEIGHT_LEVELS = 100.0  # pixels with this error count in full
_MIN_UNKNOWN_AREA = 14 / 16  # least weighted area within 3 x 3 units for an unknown, in square units
_MIN_FAINT_LEVELS = 12.0  # least tint of a detected faint object
_MIN_FAINT_SHARE = 0.5  # least share of its window's energy that it explains
_FAINT_NOISE_MULTIPLE = 12.0  # multiple of the noise energy to exceed; chance does so once in thousands of pictures


@dataclass(frozen=True, kw_only=True)
class SceneReading:
    """A parsed picture.

    Attributes:
        background: None for an unknown paint.
        objects: the accepted objects.
        doubt: largest doubt of an accepted object, 0 for an exact rendering, 1 at the limit of acceptance.
        unknown: True if the background and the objects leave part of the picture unexplained.
        height: in units.
    """

    background: str | None
    objects: tuple[SceneObject, ...] = ()
    doubt: float = 0.0
    unknown: bool = False
    height: int = UNITS

    @property
    def scene(self) -> Scene | None:
        """The scene; None if any part of the picture is unknown."""
        if self.background is None or self.unknown:
            return None
        return Scene(objects=self.objects, background=self.background, height=self.height)


class _Background(NamedTuple):
    """A background paint with its measured level and noise."""

    name: str
    level: np.ndarray  # [3]
    paints: np.ndarray  # [C, 3], the palette as differences from `level`
    noise: float  # energy of noise per pixel


def read(picture: np.ndarray, *, backgrounds: Sequence[str] = tuple(BACKGROUNDS)) -> SceneReading:
    """Parse a picture, uint8 [H, W, 3]; `backgrounds` are the paints to try as its background.

    Raises `ValueError` if the shape is not that of a scene or a panel (see the module docstring).
    """
    pixels, unit = as_pixels(picture)
    most_likely: SceneReading | None = None
    # Stripes that are a pixel off the half-unit grid are found only by the finer search.
    row_steps = dict.fromkeys((max(1, unit // 2), 1))
    for row_step, background in product(row_steps, _estimate_backgrounds(pixels, backgrounds)):
        reading = _read_objects(pixels, background, unit, row_step)
        if reading.scene is not None:
            return reading
        most_likely = most_likely or reading
    return most_likely or SceneReading(background=None, height=len(pixels) // unit)


def as_pixels(picture: np.ndarray) -> tuple[np.ndarray, int]:
    """Return float32 [H, W, 3] with W <= 48, and the pixels per unit. Raises `ValueError` for other shapes."""
    h, w = picture.shape[:2]
    if picture.ndim != 3 or picture.shape[2] != 3 or w % UNITS or h not in (w, w // 2):
        raise ValueError(f"picture has shape {picture.shape}, not [12 n, 12 n, 3] or [6 n, 12 n, 3]")
    pixels = picture.astype(np.float32)
    if w > MAX_PIXELS_WIDE:
        down, across = (area_weights(n, MAX_PIXELS_WIDE * n // w).astype(np.float32) for n in (h, w))
        pixels = (across @ (down @ pixels.reshape(h, -1)).reshape(-1, w, 3)).astype(np.float32)
    return pixels, pixels.shape[1] // UNITS


def _estimate_backgrounds(pixels: np.ndarray, names: Sequence[str]) -> Iterator[_Background]:
    """Yield the candidate backgrounds of `pixels`, float32 [H, W, 3], most frequent first."""
    candidates = np.array([BACKGROUNDS.get(name) or COLORS[name] for name in names], np.float32)
    paints = np.concatenate([candidates, _PALETTE])
    flat = pixels.reshape(-1, 3)
    nearest = ((paints**2).sum(1) - 2 * flat @ paints.T).argmin(1)
    counts = np.bincount(nearest, minlength=len(paints))[: len(names)]
    for k in np.argsort(-counts, kind="stable"):
        if counts[k] < _MIN_BACKGROUND_SHARE * len(flat):
            return
        members = flat[nearest == k]
        level = np.median(members, 0)
        cast = level - candidates[k]
        if cast @ cast <= _MAX_TINT_DISTANCE**2:
            paints_on_level = np.clip(_PALETTE + cast, 0, 255) - level
            yield _Background(names[int(k)], level, paints_on_level, noise_energy(abs(members - level)))


def noise_energy(deviations: np.ndarray) -> float:
    """Return the energy of Gaussian noise per pixel, given absolute `deviations` [..., 3] from the level."""
    # 1.48 x the median absolute deviation is the sigma of Gaussian noise.
    return float(((1.4826 * np.median(deviations.reshape(-1, 3), 0)) ** 2).sum())


def _read_objects(pixels: np.ndarray, background: _Background, unit: int, row_step: int) -> SceneReading:
    """Find the objects on a background, and decide whether they explain the picture."""
    canvas = Canvas((pixels - background.level).transpose(2, 0, 1), background.noise, unit)
    fits = []
    for candidate in canvas.candidates(background.paints, row_step):
        fits.append(canvas.fit(background.paints, *candidate))
        canvas.add(fits[-1], -1)
    errors = np.pad(pixel_errors(canvas.inside, background.noise), canvas.pad)
    objects: list[SceneObject] = []
    largest_doubt, unknown = 0.0, False
    for fit in fits:
        item, doubt, residual = _assess(canvas, fit, errors, background)
        if item is not None:
            objects.append(item)
            largest_doubt = max(largest_doubt, doubt)
        else:
            canvas.add(fit, +1)
            resembles_object = residual < _MAX_RESEMBLING_RESIDUAL
            unknown |= resembles_object and bool(np.linalg.norm(fit.tint) >= MIN_UNEXPLAINED_LEVELS)
    boxes = [outer_box(item, unit) for item in objects]
    return SceneReading(
        background=background.name,
        objects=tuple(objects),
        doubt=largest_doubt,
        unknown=unknown or is_unexplained(canvas.inside, background.noise, unit, boxes),
        height=len(pixels) // unit,
    )


def _assess(
    canvas: Canvas, fit: Fit, errors: np.ndarray, background: _Background
) -> tuple[SceneObject | None, float, float]:
    """Accept or reject a fit, given the `errors` [H', W'] left by all fits together.

    Returns the object, None if rejected; the doubt, 0 for an exact rendering and 1 at the limit of acceptance; and the
    share of the object's energy left unexplained.
    """
    bank = template_bank(fit.size, canvas.unit)
    distances = np.linalg.norm(background.paints - fit.tint, axis=1)
    color = int(distances.argmin())
    contrast = max(float(np.linalg.norm(background.paints[color])), 1.0)  # white on a white background has none
    energy = float(bank.energy[fit.template]) * contrast**2
    window = slice(fit.y, fit.y + bank.window), slice(fit.x, fit.x + bank.window)
    # The largest mean error over a square of pixels, less that of noise: a bite.
    side = max(1, round(_LOCAL_SIDE * canvas.unit))
    means = np.stack([square_sums(channel[window], side) for channel in canvas.field]) / side**2
    bias = float(np.sqrt((means**2).sum(0)).max()) - _NOISE_MULTIPLE * background.noise**0.5 / side
    doubts = [
        wrong_pixels(errors[window] / contrast) / (MAX_WRONG_SHARE * float(bank.area[fit.template])),
        bias / (_MAX_LOCAL_ERROR * contrast),
        float(distances[color]) / _MAX_TINT_DISTANCE,
        fit.rival_gain / (_MAX_RIVAL_GAIN * energy),
    ]
    if fit.residual > _MIN_AMBIGUOUS_RESIDUAL * energy:
        doubts.append(fit.residual / (_MAX_RESIDUAL_RATIO * fit.runner_up))
    item, form = None, fit.template % template_matching.NUM_FORMS
    if form < len(template_matching.FORMS) and max(doubts) <= 1:  # not a distractor
        shape, fill = template_matching.FORMS[form]
        y, x = ((at - ring_width(canvas.unit)) / canvas.unit for at in (fit.y, fit.x))
        item = SceneObject(shape=shape, color=list(COLORS)[color], size=fit.size, fill=fill, x=x, y=y)
    return item, max(doubts), fit.residual / energy


def pixel_errors(residual: np.ndarray, noise: float) -> np.ndarray:
    """Return the error of each pixel of `residual` [3, H, W], in levels, less that of noise."""
    errors = (np.sqrt((residual**2).sum(0)) - _NOISE_MULTIPLE * noise**0.5).clip(0)
    seam = residual.shape[2] // UNITS // 4  # decoders blur the border of the two panels
    errors[:seam] = errors[len(errors) - seam :] = 0
    return errors


def wrong_pixels(error: np.ndarray) -> float:
    """Return the number of clearly wrong pixels (weighted), given errors as shares of the contrast."""
    return float(((error - _TOLERATED_ERROR) / (1 - _TOLERATED_ERROR)).clip(0).sum())


def is_unexplained(residual: np.ndarray, noise: float, unit: int, boxes: Sequence[tuple[int, int, int]] = ()) -> bool:
    """Return True if `residual` [3, H, W] has a large error, or a faint object, outside `boxes` (top, left, side)."""
    weights = pixel_errors(residual, noise)
    weights[weights < MIN_UNEXPLAINED_LEVELS] = 0
    weights = (weights / _FULL_WEIGHT_LEVELS).clip(max=1) ** 2
    # Noise clipped at 0 or 255 has a mean off its median, which would pass for a faint object.
    level = residual[:, (residual**2).sum(0) <= 9 * noise + 1]
    residual = residual - (level.mean(1)[:, None, None] if level.size else 0)
    noises = np.full(weights.shape, noise)
    for box in boxes:
        for values in (weights, noises, *residual):
            block(values, *box)[:] = 0
    if square_sums(weights, 3 * unit).max() >= _MIN_UNKNOWN_AREA * unit**2:
        return True
    # The search for objects favors tints of the palette and misses a faint object.
    canvas = Canvas(residual, noises, unit)
    least = template_matching.MIN_ENERGY_GAIN * unit**2 + _FAINT_NOISE_MULTIPLE * noise
    for size in SIZES:
        bank = template_bank(size, unit)
        total = canvas.energy(bank.window)
        ys, xs = np.nonzero(total >= least)
        energy = bank.energy[SEARCH_TEMPLATES]
        explained = (canvas.inner_products(bank, ys, xs, SEARCH_TEMPLATES) ** 2).sum(0) / energy
        stands_out = explained >= _MIN_FAINT_LEVELS**2 * energy
        stands_out &= explained >= _MIN_FAINT_SHARE * total[ys, xs, None]
        if (stands_out & (explained >= least)).any():
            return True
    return False


def block(field: np.ndarray, top: int, left: int, side: int) -> np.ndarray:
    """Return a view of the part of a square inside `field` [H, W]."""
    return field[max(0, top) : max(0, top + side), max(0, left) : max(0, left + side)]


def outer_box(item: SceneObject, unit: int) -> tuple[int, int, int]:
    """Return top, left and side of an object's box with the ring around it, in pixels."""
    ring = ring_width(unit)
    return round(item.y * unit) - ring, round(item.x * unit) - ring, EXTENT[item.size] * unit + 2 * ring
