"""The paper's two augmentations.

`augment_dvae` is Listing 1 of Ramesh et al. 2021 (appendix A.2), `augment_prior` Listing 2 (appendix
B.2): the same integer arithmetic, the same bounds (upper ends exclusive where TensorFlow's are), the
same rounding, the draws in the same order. Every picture is uint8 [H, W, 3].

Where we differ, and why:

- The random numbers are NumPy's. TensorFlow's graph-level generator cannot be reproduced.
- The listings fail on pictures whose shorter side is below `size`. Here the resized side `t` is never
  less than `size`, so that such pictures are scaled up; for all others nothing changes.
- The listings resize with `align_corners=True`. For the AREA method TensorFlow then averages over
  cells of (in - 1) / (out - 1) rather than in / out pixels: output pixel i covers
  [i s, (i + 1) s), the last one reaching past the border (clamped there). The grids drift apart by
  less than one input pixel over the whole picture. We take the true cells, in / out, which cover the
  picture exactly once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from limner.data.area_resize import area_resize
from limner.errors import UserError

Augment = Callable[[np.ndarray, int, np.random.Generator], np.ndarray]


def augment_dvae(image: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Listing 1: a random square, resized to between 9/8 and 12/8 of `size`, a random crop of it,
    flipped left to right half of the time. uint8 [H, W, 3] -> uint8 [size, size, 3]."""
    h, w = image.shape[:2]
    s_min = min(h, w)
    y, x = _random_crop(h, w, s_min, rng)
    t_min = max(size, min(s_min, round(9 / 8 * size)))
    t_max = max(size, min(s_min, round(12 / 8 * size)))
    t = int(rng.integers(t_min, t_max + 1))
    top, left = _random_crop(t, t, size, rng)
    image = area_resize(image[y : y + s_min, x : x + s_min], t, t, (top, left, size, size))
    return np.ascontiguousarray(image[:, ::-1]) if rng.random() < 0.5 else image


def augment_prior(image: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Listing 2: a nearly central square, resized to between `size` and 9/8 of it, a random crop of
    that; no flip, since pictures may show writing. uint8 [H, W, 3] -> uint8 [size, size, 3]."""
    h, w = image.shape[:2]
    s_min = min(h, w)
    y, x = (
        int(rng.integers(3 * (n - s_min) // 8, max(3 * (n - s_min) // 8 + 1, 5 * (n - s_min) // 8))) for n in (h, w)
    )
    t_max = max(size, min(s_min, round(9 / 8 * size)))
    t = int(rng.integers(size, t_max + 1))
    top, left = _random_crop(t, t, size, rng)
    return area_resize(image[y : y + s_min, x : x + s_min], t, t, (top, left, size, size))


def augment_none(image: np.ndarray, size: int, rng: np.random.Generator | None = None) -> np.ndarray:
    """The central square, resized: what evaluation and cached tokens see. Draws nothing."""
    h, w = image.shape[:2]
    s_min = min(h, w)
    y, x = (h - s_min) // 2, (w - s_min) // 2
    return area_resize(image[y : y + s_min, x : x + s_min], size, size)


def _random_crop(h: int, w: int, size: int, rng: np.random.Generator) -> tuple[int, int]:
    """`tf.image.random_crop`: the top left corner, uniform over all places, row before column."""
    return int(rng.integers(0, h - size + 1)), int(rng.integers(0, w - size + 1))


AUGMENTS: dict[str, Augment] = {"dvae": augment_dvae, "prior": augment_prior, "none": augment_none}


def largest_side(augment: str, size: int) -> int:
    """The largest side `t` to which an augmentation resizes its square before the last crop."""
    return max(size, round({"dvae": 12 / 8, "prior": 9 / 8, "none": 1}[augment] * size))


def get_augment(name: str) -> Augment:
    """An augmentation by name; a wrong name is a `UserError`."""
    if name not in AUGMENTS:
        raise UserError(f'there is no augmentation "{name}": choose one of {", ".join(AUGMENTS)}')
    return AUGMENTS[name]
