"""Pictures in a request: a part that stays (priming, inpainting), or a whole picture that the drawing follows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from PIL import Image

from limner.data.augment import augment_none
from limner.data.image_decode import to_rgb
from limner.errors import UserError
from limner.retrieval import Examples
from limner.sampling.generation_config import UNSET
from limner.text import PAD

__all__ = ["add_given", "follow", "follow_example", "prompt", "square"]


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


def follow(tokens: np.ndarray) -> np.ndarray:
    """Return prompt tokens [2 S] that ask for a picture like that of tokens [S], but as the caption says."""
    return np.concatenate([np.full_like(tokens, UNSET), tokens])


def follow_example(
    examples: Examples | None, caption: str, closest: Callable[[np.ndarray], int]
) -> tuple[np.ndarray | None, str | None]:
    """Return prompt tokens [2 S] to follow an example of the caption's subject, and its name; None without one. If
    there are K > 1, `closest` returns the row of the best one, given the tokens [K, S] of all."""
    if examples is None or not len(rows := examples.about(caption)):
        return None, None
    tokens = examples.tokens[rows].astype(np.int64)
    best = closest(tokens) if len(rows) > 1 else 0
    return follow(tokens[best]), examples.name(rows[best])


def add_given(
    text: np.ndarray, prompt_tokens: np.ndarray | None, positions: int, can_follow: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """Move a picture to follow from the prompt tokens, [S] or [2 S], to the caption's: [T] -> [T + S], with PAD if none
    is given. Prompt tokens that are all `UNSET` become None. The caption stays [T] unless the prior `can_follow`.

    Raises `UserError` if a picture to follow is given in vain.
    """
    tokens = np.full(positions, UNSET) if prompt_tokens is None else prompt_tokens
    kept, given = np.split(tokens, [positions])
    if can_follow:
        text = np.concatenate([text, given if len(given) else np.full(positions, PAD)])
    elif len(given):
        raise UserError("this model takes captions alone: use one that was trained with pictures to follow")
    return text, None if (kept == UNSET).all() else kept
