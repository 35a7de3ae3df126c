"""Parser of the two panels of a pair, and the test that the lower panel is the upper one in gray."""

from __future__ import annotations

import numpy as np

from limner.tasks.acceptance import MAX_WRONG_SHARE, pixel_errors, wrong_pixels
from limner.tasks.rendering import alpha_mask, render, transform_panel
from limner.tasks.residuals import MIN_UNEXPLAINED_LEVELS, find_faint_object, unexplained, worst_patch
from limner.tasks.scene_reader import SceneReading, as_pixels, read
from limner.tasks.scenes import BACKGROUNDS, EXTENT, SKETCH_BACKGROUND, Scene, ScenePair, Transform
from limner.tasks.templates import block, ring_width


def read_pair(picture: np.ndarray, transform: Transform | None) -> tuple[SceneReading, SceneReading]:
    """Parse the two panels, top and bottom, of uint8 [H, H, 3].

    For "upside down", the bottom is flipped back first. Paints of "grayscale" panels are outside the
    palette, so their reading is unreliable: `is_gray_of` compares pixels instead.
    """
    pixels, _ = as_pixels(picture)
    half = len(pixels) // 2
    top, bottom = pixels[:half], pixels[half:]
    upright = bottom[::-1] if transform == "upside down" else bottom
    return read(top), read(upright, backgrounds=(*BACKGROUNDS, SKETCH_BACKGROUND))


def is_gray_of(picture: np.ndarray, top: Scene) -> bool:
    """Return True if the bottom panel of uint8 [H, H, 3] is the luma of the top panel, parsed as `top`.

    It compares pixels: an object may nearly vanish in gray (orange on gray), where no template would find it.
    """
    pixels, unit = as_pixels(picture)
    upper, lower = np.split(pixels, 2)
    pair = ScenePair(top=top, transform="grayscale")
    gray = transform_panel(pair, upper, pixels.shape[1]).astype(np.float32)
    residual = (lower - gray).transpose(2, 0, 1)
    cast = np.median(residual, (1, 2), keepdims=True)
    if np.linalg.norm(cast) > MIN_UNEXPLAINED_LEVELS:
        return False
    residual -= cast
    noise = float(((1.4826 * np.median(abs(residual), (1, 2))) ** 2).sum())
    if worst_patch(unexplained(residual, noise), unit) is not None:
        return False
    if find_faint_object(residual, (), noise, unit):
        return False
    error, ring = pixel_errors(residual, noise), ring_width(unit)
    expected = transform_panel(pair, render(top, pixels.shape[1]), pixels.shape[1])
    for item in top.objects:
        left, up, side = (round(v * unit) for v in (item.x, item.y, EXTENT[item.size]))
        box = (up - ring, left - ring, side + 2 * ring)
        levels = block(expected[..., 0], *box).astype(np.float32)
        contrast = max(3**0.5 * float(np.ptp(levels)), MIN_UNEXPLAINED_LEVELS)
        area = alpha_mask(item.shape, item.size, item.fill, unit).sum()
        if wrong_pixels(block(error, *box) / contrast) > MAX_WRONG_SHARE * area:
            return False
    return True
