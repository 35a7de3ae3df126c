"""Scene parser: reads a picture of the synthetic scenes into a `Scene`, without a learned model.

Analysis by synthesis. A synthetic picture is a flat background plus, for every object, its opacity stencil
times the difference of two paints. Parsing searches for the few (shape, fill, size, color, position) that leave
the least squared error:

1. *Background* (`background.py`): the paint that is nearest to most pixels. Their median is the level of the
   background, so a color cast cancels. `D = picture - background` remains to be explained.
2. *Search* (`template_matching.py`): every stencil (`templates.py`) is tried at every half unit. A stencil `t` with
   `n = |t|^2` explains most with the tint `T / n` where `T = <t, D>`, namely `|T|^2 / n` of the energy in its
   window. Positions are chosen greedily by energy explained minus energy left over, *including* a ring of half a
   unit around the box: four small squares must not pass for a large one.
3. *Refinement* (`template_matching.py`): all stencils, sharp and blurred (a decoder's edges are soft), at every
   pixel around each position. The best fit is subtracted before the next position is fitted.
4. *Acceptance* (`acceptance.py`): an object is accepted if few of its pixels are clearly wrong, no patch of pixels
   shares a large error (a bite), its tint is near the palette and no other look fits as well.
5. *Residuals* (`residuals.py`): a large residual outside accepted objects, strong or faint, becomes an *unknown*
   sighting. A picture with unknowns matches no caption, so that no score is too high.

Blur, noise and compression leave small errors everywhere, of either sign. A malformed object leaves local errors
of full contrast. So single errors below a third of the contrast are free. Single pixels of a faint
object are too weak to count. It is detected by its shape, in any tint, if the average over a stencil exceeds the noise.

Known false acceptances: an octagon for a circle; objects with a bite, a notch or a bump of less than about
half of a square of 3/4 units (1/20 of a small solid circle, 1/60 of a large one); once in a few hundred times
a small diamond without a corner, as one shifted a little; faint objects whose tint is less than 12 levels off
the background (root of the sum of squares over channels; up to 25 for small outlines and stripes); and faint
objects mostly behind or within half a unit of another object.

Pictures are uint8 [H, W, 3], `W` a multiple of 12, `H` equal to `W` or (a panel of a pair) half of it.
Area averaging reduces pictures wider than 48 pixels to 48 first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from limner.data.area_resize import area_weights
from limner.tasks.acceptance import Sighting, errors_of, weigh
from limner.tasks.background import Ground, grounds
from limner.tasks.residuals import DEBRIS_LEVELS, ghost_on, with_unknown
from limner.tasks.scenes import BACKGROUNDS, UNITS, Scene, Thing
from limner.tasks.template_matching import Canvas

FINEST = 48  # pixels; wider pictures are averaged down to this


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A parsed picture: its background (None for an unknown paint) and the sightings on it."""

    background: str | None
    sightings: tuple[Sighting, ...]
    height: int = UNITS

    @property
    def things(self) -> tuple[Thing, ...]:
        """The accepted objects."""
        return tuple(s.thing for s in self.sightings if s.thing is not None)

    @property
    def scene(self) -> Scene | None:
        """The scene; None if any part of the picture is unknown."""
        if self.background is None or len(self.things) < len(self.sightings):
            return None
        return Scene(things=self.things, background=self.background, height=self.height)


def read(picture: np.ndarray, *, backgrounds: Sequence[str] = tuple(BACKGROUNDS)) -> Reading:
    """Parse a picture, uint8 [H, W, 3]; `backgrounds` are the paints to try as its background.

    Raises `ValueError` if the shape is not that of a scene or a panel (see the module docstring).
    """
    pixels, unit = as_pixels(picture)
    height = len(pixels) // unit
    first: Reading | None = None
    # Stripes that are a pixel off the half-unit grid are found only by the finer search.
    row_steps = dict.fromkeys((max(1, unit // 2), 1))
    for row_step, ground in product(row_steps, grounds(pixels, backgrounds)):
        sightings = _see(pixels, ground, unit, row_step)
        reading = Reading(background=ground.name, sightings=sightings, height=height)
        if reading.scene is not None:
            return reading
        first = first or reading
    return first or Reading(background=None, sightings=(), height=height)


def _see(pixels: np.ndarray, ground: Ground, unit: int, row_step: int) -> tuple[Sighting, ...]:
    canvas = Canvas(pixels, ground, unit)
    fits = []
    for place in canvas.places(row_step):
        fits.append(canvas.fit(*place))
        canvas.add(fits[-1], -1)
    errors = np.pad(errors_of(canvas.rest, ground.noise), canvas.pad)
    sightings = []
    for fit in fits:
        sighting = weigh(canvas, fit, errors)
        if sighting.thing is None:
            canvas.add(fit, +1)
        if sighting.thing is not None or np.linalg.norm(fit.tint) >= DEBRIS_LEVELS:
            sightings.append(sighting)
    seen = with_unknown(sightings, canvas.rest, ground.noise, unit)
    if all(s.thing is not None for s in seen) and (ghost := ghost_on(canvas.rest, seen, ground.noise, unit)):
        seen = (*seen, ghost)
    return seen


def as_pixels(picture: np.ndarray) -> tuple[np.ndarray, int]:
    """Return float32 [H, W, 3] with W <= 48, and the pixels per unit. Raises `ValueError` for other shapes."""
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
    """Return the matrix of area averaging, float32 [new, old]."""
    return area_weights(old, new).astype(np.float32)
