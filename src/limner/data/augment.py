"""The two augmentations of Ramesh et al. 2021, and resizing without augmentation.

`augment_dvae` is Listing 1 (appendix A.2), `augment_prior` Listing 2 (appendix B.2), with the same
integer arithmetic, bounds (upper ends exclusive where TensorFlow's are), rounding and order of random
draws. Every picture is uint8 [H, W, 3].

Differences from the listings:

- NumPy draws the random numbers. TensorFlow's graph-level generator cannot be reproduced.
- The listings fail on pictures whose shorter side is below `size`. Here the resized side `t` is at
  least `size`, which enlarges such pictures and leaves larger ones unchanged.
- The listings resize with `align_corners=True`. For the AREA method TensorFlow then averages over
  cells of s = (in - 1) / (out - 1) rather than in / out pixels: output pixel i covers
  [i s, (i + 1) s), clamped at the border. The grids drift apart by less than one input pixel over
  the whole picture. limner averages over the true cells, in / out, which cover the picture exactly
  once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from PIL import Image

from limner.data.area_resize import area_resize
from limner.errors import UserError

Augment = Callable[[np.ndarray, int, np.random.Generator], np.ndarray]


def augment_dvae(image: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Apply Listing 1: random square, resize to between 9/8 and 12/8 of `size`, random crop, and
    horizontal flip with probability 1/2. uint8 [H, W, 3] -> uint8 [size, size, 3]."""
    h, w = image.shape[:2]
    y, x = _random_crop(h, w, min(h, w), rng)
    image = _resize_and_crop(image[y : y + min(h, w), x : x + min(h, w)], size, (9 / 8, 12 / 8), rng)
    return np.ascontiguousarray(image[:, ::-1]) if rng.random() < 0.5 else image


def augment_prior(image: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Apply Listing 2: nearly central square, resize to between `size` and 9/8 `size`, random crop;
    no flip, since pictures may show text. uint8 [H, W, 3] -> uint8 [size, size, 3]."""
    h, w = image.shape[:2]
    s_min = min(h, w)
    y, x = (
        int(rng.integers(3 * (n - s_min) // 8, max(3 * (n - s_min) // 8 + 1, 5 * (n - s_min) // 8))) for n in (h, w)
    )
    return _resize_and_crop(image[y : y + s_min, x : x + s_min], size, (1, 9 / 8), rng)


def augment_none(image: np.ndarray, size: int, rng: np.random.Generator | None = None) -> np.ndarray:
    """Resize the central square, for evaluation and cached tokens. Does not use `rng`."""
    h, w = image.shape[:2]
    s_min = min(h, w)
    y, x = (h - s_min) // 2, (w - s_min) // 2
    return area_resize(image[y : y + s_min, x : x + s_min], size, size)


def resize_bicubic(image: np.ndarray, size: int, rng: np.random.Generator | None = None) -> np.ndarray:
    """Resize the shorter side by Pillow's bicubic filter and crop the center, as published CLIP models do (Radford et
    al. 2021, with torchvision's rounding of the sides). Resizes only what the crop shows. Does not use `rng`."""
    shorter = min(image.shape[:2])
    ends = []
    for side in image.shape[1::-1]:
        resized = size * side // shorter
        start = round((resized - size) / 2)
        ends.append((start * side / resized, (start + size) * side / resized))
    (left, right), (top, bottom) = ends
    resized = Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC, (left, top, right, bottom))
    return np.asarray(resized)


def _random_crop(h: int, w: int, size: int, rng: np.random.Generator) -> tuple[int, int]:
    """Draw the top left corner of `tf.image.random_crop`: uniform, row before column."""
    return int(rng.integers(0, h - size + 1)), int(rng.integers(0, w - size + 1))


def _resize_and_crop(
    square: np.ndarray, size: int, factors: tuple[float, float], rng: np.random.Generator
) -> np.ndarray:
    """Resize a square to a random side between two multiples of `size`, and crop it. Enlarges only to `size`."""
    t_min, t_max = (max(size, min(len(square), round(factor * size))) for factor in factors)
    t = int(rng.integers(t_min, t_max + 1))
    top, left = _random_crop(t, t, size, rng)
    return area_resize(square, t, t, (top, left, size, size))


#: Each augmentation, with the largest side to which it resizes its square before the last crop, relative to `size`.
AUGMENTS: dict[str, tuple[Augment, float]] = {
    "dvae": (augment_dvae, 12 / 8),
    "prior": (augment_prior, 9 / 8),
    "none": (augment_none, 1),
    "bicubic": (resize_bicubic, 2**16),  # of an unreduced picture: the filter is not one of area
}


def get_augment(name: str) -> tuple[Augment, float]:
    """Return an entry of `AUGMENTS`. Raises `UserError` if the name is unknown."""
    if name not in AUGMENTS:
        raise UserError(f'unknown augmentation "{name}": choose one of {", ".join(AUGMENTS)}')
    return AUGMENTS[name]
