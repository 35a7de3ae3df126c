"""Scene parser: reads a picture of the synthetic scenes into a `Scene`, without a learned model.

Analysis by synthesis. A synthetic picture is a flat background plus, for every object, its alpha mask times
the difference of two paints. Parsing searches for the few (shape, fill, size, color, position) that leave
the least squared error:

1. *Background* (`background.py`): the paint that is nearest to most pixels. Their median is the level of the
   background, so a color cast cancels. `D = picture - background` remains to be explained.
2. *Search* (`template_matching.py`): every template (`templates.py`) is tried at every half unit. A template `t` with
   `n = |t|^2` explains most with the tint `T / n` where `T = <t, D>`, namely `|T|^2 / n` of the energy in its
   window. Positions are chosen greedily by energy explained minus energy left over, *including* a ring of half a
   unit around the box: four small squares must not pass for a large one.
3. *Refinement* (`template_matching.py`): all templates, sharp and blurred (a decoder's edges are soft), at every
   pixel around each position. The best fit is subtracted before the next position is fitted.
4. *Acceptance* (`acceptance.py`): an object is accepted if few of its pixels are clearly wrong, no patch of pixels
   shares a large error (a bite), its tint is near the palette and no other template fits as well.
5. *Residuals* (`residuals.py`): a large residual outside accepted objects, strong or faint, becomes an *unknown*
   detection. A picture with unknowns matches no caption, which can only lower a score. The false acceptances below
   can raise it.

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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from limner.data.area_resize import area_weights
from limner.tasks.acceptance import Detection, assess_fit, pixel_errors
from limner.tasks.background import BackgroundEstimate, estimate_backgrounds
from limner.tasks.residuals import MIN_UNEXPLAINED_LEVELS, find_faint_object, with_unknowns
from limner.tasks.scenes import BACKGROUNDS, UNITS, Scene, SceneObject
from limner.tasks.template_matching import Canvas

MAX_PIXELS_WIDE = 48  # pixels; wider pictures are averaged down to this


@dataclass(frozen=True, kw_only=True)
class SceneReading:
    """A parsed picture: its background (None for an unknown paint) and the detections on it."""

    background: str | None
    detections: tuple[Detection, ...]
    height: int = UNITS

    @property
    def objects(self) -> tuple[SceneObject, ...]:
        """The accepted objects."""
        return tuple(d.object for d in self.detections if d.object is not None)

    @property
    def scene(self) -> Scene | None:
        """The scene; None if any part of the picture is unknown."""
        if self.background is None or len(self.objects) < len(self.detections):
            return None
        return Scene(objects=self.objects, background=self.background, height=self.height)


def read(picture: np.ndarray, *, backgrounds: Sequence[str] = tuple(BACKGROUNDS)) -> SceneReading:
    """Parse a picture, uint8 [H, W, 3]; `backgrounds` are the paints to try as its background.

    Raises `ValueError` if the shape is not that of a scene or a panel (see the module docstring).
    """
    pixels, unit = as_pixels(picture)
    height = len(pixels) // unit
    most_likely: SceneReading | None = None
    # Stripes that are a pixel off the half-unit grid are found only by the finer search.
    row_steps = dict.fromkeys((max(1, unit // 2), 1))
    for row_step, background in product(row_steps, estimate_backgrounds(pixels, backgrounds)):
        detections = _detect(pixels, background, unit, row_step)
        reading = SceneReading(background=background.name, detections=detections, height=height)
        if reading.scene is not None:
            return reading
        most_likely = most_likely or reading
    return most_likely or SceneReading(background=None, detections=(), height=height)


def _detect(pixels: np.ndarray, background: BackgroundEstimate, unit: int, row_step: int) -> tuple[Detection, ...]:
    canvas = Canvas(pixels, background, unit)
    fits = []
    for candidate in canvas.candidates(row_step):
        fits.append(canvas.fit(*candidate))
        canvas.add(fits[-1], -1)
    errors = np.pad(pixel_errors(canvas.residual, background.noise), canvas.pad)
    detections = []
    for fit in fits:
        detection = assess_fit(canvas, fit, errors)
        if detection.object is None:
            canvas.add(fit, +1)
        if detection.object is not None or np.linalg.norm(fit.tint) >= MIN_UNEXPLAINED_LEVELS:
            detections.append(detection)
    kept = with_unknowns(detections, canvas.residual, background.noise, unit)
    if any(d.object is None for d in kept):
        return kept
    faint = find_faint_object(canvas.residual, kept, background.noise, unit)
    return (*kept, faint) if faint else kept


def as_pixels(picture: np.ndarray) -> tuple[np.ndarray, int]:
    """Return float32 [H, W, 3] with W <= 48, and the pixels per unit. Raises `ValueError` for other shapes."""
    h, w = picture.shape[:2]
    if picture.ndim != 3 or picture.shape[2] != 3 or w % UNITS or h not in (w, w // 2):
        raise ValueError(f"picture has shape {picture.shape}, not [12 n, 12 n, 3] or [6 n, 12 n, 3]")
    pixels = picture.astype(np.float32)
    if w > MAX_PIXELS_WIDE:
        down, across = _area_weights(h, MAX_PIXELS_WIDE * h // w), _area_weights(w, MAX_PIXELS_WIDE)
        pixels = (across @ (down @ pixels.reshape(h, -1)).reshape(-1, w, 3)).astype(np.float32)
    return pixels, pixels.shape[1] // UNITS


@lru_cache(maxsize=16)
def _area_weights(old_size: int, new_size: int) -> np.ndarray:
    """Return the matrix of area averaging, float32 [new_size, old_size]."""
    return area_weights(old_size, new_size).astype(np.float32)
