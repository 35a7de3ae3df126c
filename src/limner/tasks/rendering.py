"""Renderer of scenes: each object is an alpha mask, blended onto the background in the object's paint.

With `U` pixels per unit, a picture of a scene is uint8 [height U, width U, 3].
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from limner.tasks.scenes import BACKGROUNDS, COLORS, EXTENT, Fill, Scene, ScenePair, Shape, Size


@lru_cache(maxsize=256)
def alpha_mask(shape: Shape, size: Size, fill: Fill, unit: int) -> np.ndarray:
    """Return the opacity of an object in its box, float32 [side, side] in [0, 1]; 8 x 8 supersampling."""
    side, over = EXTENT[size] * unit, 8
    # Coordinates in [-1, 1] across the box, +y down.
    axis = (np.arange(side * over) + 0.5) / (side * over) * 2 - 1
    x, y = np.meshgrid(axis, axis)
    border = unit / side  # half a unit, as a fraction of half the side
    mask = _inside(shape, x, y, 0.0)
    if fill == "outlined":
        mask &= ~_inside(shape, x, y, border)
    elif fill == "striped":  # every second unit is empty
        mask &= (np.arange(side * over) // (over * unit) % 2 == 0)[:, None]
    return mask.reshape(side, over, side, over).mean((1, 3), dtype=np.float32)


def _inside(shape: Shape, x: np.ndarray, y: np.ndarray, inset: float) -> np.ndarray:
    """Return the mask of a shape inscribed in [-1, 1]^2, its border moved inwards by `inset`."""
    if shape == "circle":
        return x**2 + y**2 <= (1 - inset) ** 2
    if shape == "square":
        return np.maximum(abs(x), abs(y)) <= 0.92 - inset
    if shape == "diamond":
        return abs(x) + abs(y) <= 1 - inset * 2**0.5
    if shape == "triangle":  # apex up: |x| <= (y + 1) / 2
        return (y <= 1 - inset) & (abs(x) <= (y + 1) / 2 - inset * 5**0.5 / 2)
    arm = 0.45
    bars = (abs(x) <= arm - inset) & (abs(y) <= 1 - inset)
    return bars | ((abs(y) <= arm - inset) & (abs(x) <= 1 - inset))


def render(scene: Scene, size: int = 48) -> np.ndarray:
    """Render a scene as uint8 [H, W, 3], `size` pixels wide. Objects may extend past the frame.

    Raises `ValueError` if 12 does not divide `size`.
    """
    unit, remainder = divmod(size, scene.width)
    if remainder:
        raise ValueError(f"size {size} is not a multiple of {scene.width}")
    paint = BACKGROUNDS.get(scene.background) or COLORS[scene.background]
    picture = np.empty((scene.height * unit, size, 3), np.float32)
    picture[:] = paint
    for item in scene.objects:
        alpha = alpha_mask(item.shape, item.size, item.fill, unit)[..., None]
        top, left = round(item.y * unit), round(item.x * unit)
        box = picture[max(0, top) : max(0, top + len(alpha)), max(0, left) : max(0, left + len(alpha))]
        alpha = alpha[max(0, -top) :, max(0, -left) :][: box.shape[0], : box.shape[1]]
        box += alpha * (np.asarray(COLORS[item.color], np.float32) - box)
    return np.rint(picture).astype(np.uint8)


def render_pair(pair: ScenePair, size: int = 48) -> np.ndarray:
    """Render both panels as uint8 [size, size, 3]."""
    top = render(pair.top, size)
    return np.concatenate([top, transform_panel(pair, top, size)])


def transform_panel(pair: ScenePair, top: np.ndarray, size: int) -> np.ndarray:
    """Return the lower panel, given the pixels `top` of the upper one."""
    if pair.transform == "upside down":
        return top[::-1]
    if pair.transform == "grayscale":
        luma = np.rint(top @ np.array([0.299, 0.587, 0.114], np.float32)).astype(np.uint8)
        return np.repeat(luma[..., None], 3, -1)
    assert pair.bottom is not None
    return render(pair.bottom, size)
