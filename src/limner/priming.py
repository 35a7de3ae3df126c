"""The part of a picture that stays: its pixels at the model's size, and the positions to draw (priming, inpainting)."""

import numpy as np
from PIL import Image

from limner.data.augment import augment_none
from limner.data.image_decode import to_rgb
from limner.errors import UserError

__all__ = ["prompt"]


def prompt(
    image: Image.Image, size: int, grid: tuple[int, int], keep_rows: int | None, mask: Image.Image | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the picture, uint8 [3, size, size], and True at the positions to draw, bool [S].

    `grid` has rows and columns of tokens; `TextToImage.prime` explains the other arguments. Raises `UserError`.
    """
    if (keep_rows is None) == (mask is None):
        raise UserError("a picture needs either keep_rows or a mask: give one of the two")
    h, w = grid
    unset = np.ones(grid, bool)
    if keep_rows is not None:
        if keep_rows not in range(1, h):
            raise UserError(f"keep_rows must be from 1 to {h - 1} of the {h} rows of tokens, not {keep_rows!r}")
        unset[:keep_rows] = False
    elif mask is not None:
        light = augment_none(np.array(to_rgb(mask)), size).mean(-1, dtype=np.float32)
        unset = light.reshape(h, size // h, w, size // w).max((1, 3)) > 127
        if not unset.any():
            raise UserError("the mask is dark everywhere: make the part to redraw white")
    pixels = augment_none(np.array(to_rgb(image)), size).transpose(2, 0, 1)
    return np.ascontiguousarray(pixels), unset.ravel()
