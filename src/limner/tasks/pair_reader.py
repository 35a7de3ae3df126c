"""Parser of the two panels of a pair, and the test that the lower panel is the upper one in gray."""

from __future__ import annotations

import numpy as np

from limner.tasks.acceptance import WRONG, errors_of, wrong
from limner.tasks.rendering import render, stencil, transform_panel
from limner.tasks.residuals import DEBRIS_LEVELS, debris, ghost_on, worst_patch
from limner.tasks.scene_reader import Reading, as_pixels, read
from limner.tasks.scenes import BACKGROUNDS, EXTENT, PAPER, Pair, Scene, Transform
from limner.tasks.templates import block, ring_of


def read_pair(picture: np.ndarray, transform: Transform | None) -> tuple[Reading, Reading]:
    """Parse the two panels, top and bottom, of uint8 [H, H, 3].

    For "upside down", the bottom is flipped back first. Paints of "grayscale" panels are outside the
    palette, so their reading is unreliable: `is_gray_of` compares pixels instead.
    """
    pixels, _ = as_pixels(picture)
    half = len(pixels) // 2
    top, bottom = pixels[:half], pixels[half:]
    paints = (*BACKGROUNDS, PAPER)
    turned = bottom[::-1] if transform == "upside down" else bottom
    return read(top), read(turned, backgrounds=paints)


def is_gray_of(picture: np.ndarray, top: Scene) -> bool:
    """Return True if the bottom panel of uint8 [H, H, 3] is the luma of the top panel, parsed as `top`.

    It compares pixels: an object may nearly vanish in gray (orange on gray), where no stencil would find it.
    """
    pixels, unit = as_pixels(picture)
    upper, lower = np.split(pixels, 2)
    pair = Pair(top=top, transform="grayscale")
    gray = transform_panel(pair, upper, pixels.shape[1]).astype(np.float32)
    rest = (lower - gray).transpose(2, 0, 1)
    cast = np.median(rest, (1, 2), keepdims=True)
    if np.linalg.norm(cast) > DEBRIS_LEVELS:
        return False
    rest -= cast
    noise = float(((1.4826 * np.median(abs(rest), (1, 2))) ** 2).sum())
    if worst_patch(debris(rest, noise), unit) is not None:
        return False
    if ghost_on(rest, (), noise, unit):
        return False
    error, ring = errors_of(rest, noise), ring_of(unit)
    clean = transform_panel(pair, render(top, pixels.shape[1]), pixels.shape[1])
    for thing in top.things:
        left, up, side = (round(v * unit) for v in (thing.x, thing.y, EXTENT[thing.size]))
        box = (up - ring, left - ring, side + 2 * ring)
        levels = block(clean[..., 0], *box).astype(np.float32)
        contrast = max(3**0.5 * float(np.ptp(levels)), DEBRIS_LEVELS)
        area = stencil(thing.shape, thing.size, thing.fill, unit).sum()
        if wrong(block(error, *box) / contrast) > WRONG * area:
            return False
    return True
