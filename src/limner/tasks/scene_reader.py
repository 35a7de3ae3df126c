"""Reads a picture of the synthetic world back into a `Scene`, without a learned model.

Analysis by synthesis. A picture of the world is a flat background plus, for every thing, its opacity
stencil times the difference of two paints. To read it is to search for the few (shape, fill, size,
color, place) that leave the least squared error:

1. *Background* (`background.py`): the paint that most pixels come near. Their median gives its exact levels
   here, so that a color cast cancels. `D = picture - background` is what there is to explain.
2. *Search* (`template_matching.py`): every stencil (`templates.py`) is laid on every half unit. A stencil `t` with
   `n = |t|^2` explains most with the tint `T / n` where `T = <t, D>`, namely `|T|^2 / n` of the energy in its
   window. Places are taken greedily by energy explained minus energy left over, *including* a ring of half a
   unit around the box: four small squares must not pass for a large one.
3. *Refinement* (`template_matching.py`): around each place all stencils, sharp and blurred (a decoder's edges are
   soft), at every pixel. What is explained is subtracted, and the next place is fitted to the rest.
4. *Doubt* (`acceptance.py`): a thing is believed if few of its pixels are plainly wrong, nowhere are many of them off
   together (a bite), its tint is near the palette and no other look does as well.
5. *Remains* (`residuals.py`): wherever much is left that no believed thing explains, be it faint (a ghost), the
   reading holds something *unknown*. Such a picture matches no caption, so that no score is too high.

Few errors count as wrong. Blur, noise and compression leave small errors everywhere and of either sign; a
malformed thing leaves errors of full contrast in places. So single errors below a third of the contrast are
free. Single pixels of a ghost are too faint to count. It is found by its shape, in whatever tint, where the
average over a stencil stands out of the noise.

What is still taken for right: an octagon for a circle; things with a bite, a notch or a bump of less than about
half of a square of 3/4 units (1/20 of a small solid circle, 1/60 of a large one); once in a few hundred times
a small diamond without a corner, as a diamond a little beside it; ghosts whose tint is less than 12 levels off
the background (root of the sum of squares over channels; up to 25 for small outlines and stripes); and ghosts
mostly behind or within half a unit of a thing.

Pictures are uint8 [H, W, 3], `W` a multiple of 12, `H` equal to `W` or (a panel of a pair) half of
it. Those wider than 48 pixels are averaged down to 48 first.
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
    """float32 [H, W, 3] with W <= 48, and pixels per unit."""
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
