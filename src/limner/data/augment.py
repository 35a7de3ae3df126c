"""The paper's two augmentations and the exact area resizing that they stand on.

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

Area resizing is separable: `out = Wv @ image @ Wh^T`, the entry W[i, j] being the share of output cell
i that input cell j covers. A row of W has about in / out + 1 neighbouring entries that are not zero,
so both products run over narrow bands: four outputs by the few inputs that they touch.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from limner.errors import UserError

Augment = Callable[[np.ndarray, int, np.random.Generator], np.ndarray]

_BAND = 4  # outputs in a band; measured fastest of 2 .. 32 for ratios near 2
#: The most multiplications in one product. OpenBLAS divides larger ones among its own threads, which
#: all callers share: from several threads at once that was up to forty times slower.
_PRODUCT = 1 << 18
_ROWS = 128  # outputs for which the rows they average are gathered at a time
_local = threading.local()


def area_weights(n_in: int, n_out: int) -> np.ndarray:
    """The dense matrix of area resizing, float64 [n_out, n_in]: rows sum to one."""
    starts, _, bands = _bands(n_in, n_out)
    dense = np.zeros((len(bands) * _BAND, n_in))
    for b, start in enumerate(starts):
        dense[b * _BAND : (b + 1) * _BAND, start : start + bands.shape[2]] = bands[b]
    return dense[:n_out]


def _bands(n_in: int, n_out: int) -> tuple[np.ndarray, int, np.ndarray]:
    """Starts [N], width w and weights float64 [N, _BAND, w] of the bands of the weight matrix."""
    first = np.arange(0, n_out, _BAND)
    starts = first * n_in // n_out
    stops = -(-np.minimum(first + _BAND, n_out) * n_in // n_out)
    width = int((stops - starts).max())
    starts = np.minimum(starts, n_in - width)
    left = (first[:, None] + np.arange(_BAND)) * (n_in / n_out)  # [N, _BAND]
    j = (starts[:, None] + np.arange(width))[:, None]  # [N, 1, w]
    overlap = np.minimum(left[..., None] + n_in / n_out, j + 1) - np.maximum(left[..., None], j)
    return starts, width, np.maximum(overlap, 0) * (n_out / n_in)


@lru_cache(maxsize=256)
def _vertical(n_in: int, n_out: int) -> tuple[np.ndarray, np.ndarray]:
    """Input rows [N, w] and weights float32 [N, _BAND, w]."""
    starts, width, bands = _bands(n_in, n_out)
    return starts[:, None] + np.arange(width), bands.astype(np.float32)


@lru_cache(maxsize=256)
def _horizontal(n_in: int, n_out: int, channels: int) -> tuple[list[int], np.ndarray]:
    """Starts and weights float32 [N, w * channels, _BAND * channels] that act on interleaved
    channels: the Kronecker product of the band with the identity."""
    starts, width, bands = _bands(n_in, n_out)
    weights = np.zeros((len(bands), width, channels, _BAND, channels), np.float32)
    for c in range(channels):
        weights[:, :, c, :, c] = bands.transpose(0, 2, 1)
    return starts.tolist(), weights.reshape(len(bands), width * channels, _BAND * channels)


def area_resize(
    image: np.ndarray,
    height: int,
    width: int,
    window: tuple[int, int, int, int] | None = None,
) -> np.ndarray:
    """Resize uint8 [H, W, C] to uint8 [height, width, C] by averaging over the area of each output
    pixel, rounding half to even. Works up and down.

    `window` = (top, left, rows, columns) returns that part of the result alone, at its share of
    the cost.
    """
    top, left, rows, columns = window or (0, 0, height, width)
    if image.shape[:2] == (height, width):
        return np.ascontiguousarray(image[top : top + rows, left : left + columns])
    n_rows, n_columns, channels = image.shape

    starts, bands = _horizontal(n_columns, width, channels)
    b0, b1 = left // _BAND, -(-(left + columns) // _BAND)  # the bands that the window touches
    x0, span = starts[b0], bands.shape[1]
    used = image[:, x0 : starts[b1 - 1] + span // channels]

    reads, weights = _vertical(n_rows, height)
    a0, a1 = top // _BAND, -(-(top + rows) // _BAND)
    mid = _scratch("mid", a1 - a0, _BAND, used.shape[1] * channels)
    for a in range(0, a1 - a0, _ROWS // _BAND):  # a part at a time, so that it stays in the cache
        part = slice(a, min(a + _ROWS // _BAND, a1 - a0))
        read = reads[a0:a1][part]
        tall = _scratch("tall", *read.shape, mid.shape[2])
        tall[:] = used[read].reshape(tall.shape)
        for x in _chunks(mid.shape[2], _BAND * read.shape[1]):
            np.matmul(weights[a0:a1][part], tall[:, :, x], out=mid[part, :, x])
    mid = mid.reshape((a1 - a0) * _BAND, -1)[top - a0 * _BAND :][:rows]

    step = _BAND * channels
    out = _scratch("out", rows, (b1 - b0) * step)
    for y in _chunks(rows, span * step):
        upper, result = mid[y], out[y]
        for b in range(b0, b1):
            x, to = (starts[b] - x0) * channels, (b - b0) * step
            np.matmul(upper[:, x : x + span], bands[b], out=result[:, to : to + step])
    skip = (left - b0 * _BAND) * channels
    out = out[:, skip : skip + columns * channels]
    # An average of uint8 values needs no clipping: it rounds into [0, 255].
    return np.rint(out, out=out).astype(np.uint8).reshape(rows, columns, channels)


def _scratch(name: str, *shape: int) -> np.ndarray:
    """Memory of this thread, float32, kept between calls: fresh pages cost as much as the products."""
    size, buffers = math.prod(shape), _local.__dict__
    if name not in buffers or buffers[name].size < size:
        buffers[name] = np.empty(size, np.float32)
    return buffers[name][:size].reshape(shape)


def _chunks(length: int, cost: int) -> list[slice]:
    """Slices of `range(length)` that keep a product of `cost` multiplications each within bounds."""
    step = max(1, _PRODUCT // cost)
    return [slice(start, start + step) for start in range(0, length, step)]


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
