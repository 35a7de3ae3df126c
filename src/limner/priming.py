"""Pictures in a request: a part that stays (priming, inpainting), or a whole picture that the drawing follows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from limner.data.augment import augment_none
from limner.data.image_decode import to_rgb
from limner.errors import UserError
from limner.text import PAD

if TYPE_CHECKING:
    from torch import Tensor

    from limner.models.transformer import TransformerConfig

__all__ = ["add_given", "prompt", "square"]


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
    return square(image, size), unset.ravel()


def square(image: Image.Image, size: int) -> np.ndarray:
    """Return the central square of a picture, resized, uint8 [3, size, size]."""
    return np.ascontiguousarray(augment_none(np.array(to_rgb(image)), size).transpose(2, 0, 1))


def add_given(text: Tensor, prompt_tokens: Tensor | None, config: TransformerConfig) -> tuple[Tensor, Tensor | None]:
    """Move a picture to follow from the prompt tokens, [S] or [2 S], to the caption's: [T] -> [T + S], with PAD if none
    is given. The caption stays [T] if the prior takes captions alone. Raises `UserError` if it does and one is given.
    """
    t, positions = len(text), config.grid[0] * config.grid[1]
    given = text[:0] if prompt_tokens is None else prompt_tokens[positions:]
    if config.condition_blocks:
        packed = text.new_full((t + positions,), PAD)
        packed[:t], packed[t : t + len(given)] = text, given
        text = packed
    elif len(given):
        raise UserError("this model takes captions alone: use one that was trained with pictures to follow")
    return text, None if prompt_tokens is None else prompt_tokens[:positions]
