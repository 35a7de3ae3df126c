"""Exact area resizing: each output pixel is the mean over the area of the input that it covers.

The operation is separable: `out = Wv @ image @ Wh^T`, where W[i, j] is the share of output cell i
that input cell j covers. A row of W has about in / out + 1 adjacent nonzero entries, so both products
run over bands: blocks of a few outputs and the inputs that they cover. One NumPy call multiplies many
bands, since threads lose time when they reacquire the GIL after each call.
"""

from __future__ import annotations

import math
import threading
from functools import lru_cache

import numpy as np

_BAND = 4  # output rows in a band; measured fastest of 2 .. 32 for ratios near 2
_ROWS_PER_GATHER = 128  # output rows per gathering of the input, which then stays in the cache
MAX_GATHERED_VALUES = 1 << 24  # most input values per gathering
#: The most multiplications in one product. OpenBLAS divides larger products among its threads, which
#: all callers share: with several concurrent callers this was up to forty times slower.
_MAX_MULTIPLICATIONS = 1 << 18
_local = threading.local()


def area_weights(n_in: int, n_out: int) -> np.ndarray:
    """Return the dense matrix of area resizing, float64 [n_out, n_in]; its rows sum to one."""
    return _overlap(n_in, n_out, np.arange(n_out), np.arange(n_in))


def _overlap(n_in: int, n_out: int, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """Entries [..., I, J] of `area_weights`, for i of shape [..., I] and j of shape [..., J]; zero
    beyond the borders."""
    ratio = n_in / n_out
    left = np.minimum(i, n_out)[..., None] * ratio
    right = np.minimum(i + 1, n_out)[..., None] * ratio
    j = j[..., None, :]
    return np.maximum(np.minimum(right, j + 1) - np.maximum(left, j), 0) / ratio


@lru_cache(maxsize=256)
def _vertical(n_in: int, n_out: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the input rows [N, w] and weights [N, _BAND, w] of bands of `_BAND` outputs."""
    first = np.arange(0, n_out, _BAND)
    starts = first * n_in // n_out
    stops = -(-np.minimum(first + _BAND, n_out) * n_in // n_out)
    width = int((stops - starts).max())
    reads = np.minimum(starts, n_in - width)[:, None] + np.arange(width)
    weights = _overlap(n_in, n_out, first[:, None] + np.arange(_BAND), reads)
    return reads, weights.astype(np.float32)


@lru_cache(maxsize=128)
def _horizontal(n_in: int, n_out: int, channels: int) -> tuple[int, int, int, np.ndarray]:
    """Return bands whose inputs are evenly spaced, so that one strided view holds all bands.

    Returns the outputs per band, the step between bands, the first input of the first band (both in
    pixels) and the weights float32 [N, w * channels, band * channels]. The weights act on interleaved
    channels: each is the Kronecker product of a band with the identity. The band size makes the true
    step, band * in / out, nearly an integer; the width w covers the drift.
    """
    ratio = n_in / n_out

    def cost(band: int) -> float:  # multiplications, in registers of 16
        drift = abs(band * ratio - round(band * ratio)) * n_out / band
        return (band * ratio + 2 + drift) * -(-band * channels // 16) / band

    band = min(range(3, 17), key=cost)
    step = round(band * ratio)
    first = np.arange(0, n_out, band)
    regular = np.arange(len(first)) * step
    start = int((first * n_in // n_out - regular).min())
    width = int((-(-np.minimum(first + band, n_out) * n_in // n_out) - regular).max()) - start
    reads = (regular + start)[:, None] + np.arange(width)
    bands = _overlap(n_in, n_out, first[:, None] + np.arange(band), reads)
    weights = np.zeros((len(first), width, channels, band, channels), np.float32)
    for c in range(channels):
        weights[:, :, c, :, c] = bands.transpose(0, 2, 1)
    return band, step, start, weights.reshape(len(first), width * channels, band * channels)


def area_resize(
    image: np.ndarray, height: int, width: int, window: tuple[int, int, int, int] | None = None
) -> np.ndarray:
    """Resize uint8 [H, W, C] to uint8 [height, width, C] by averaging over the area of each output
    pixel, rounding half to even. Enlarges and shrinks.

    `window` = (top, left, rows, columns) computes only that part, uint8 [rows, columns, C], at a proportional cost.
    """
    top, left, rows, columns = window or (0, 0, height, width)
    if image.shape[:2] == (height, width):
        return np.ascontiguousarray(image[top : top + rows, left : left + columns])
    n_rows, n_columns, channels = image.shape

    # The bands in the window, and their input columns x0 .. x1, which may extend beyond the borders.
    band, step, start, across = _horizontal(n_columns, width, channels)
    b0, b1 = left // band, -(-(left + columns) // band)
    across = across[b0:b1]
    span = across.shape[1]
    x0, x1 = b0 * step + start, (b1 - 1) * step + start + span // channels
    inside = slice(max(x0, 0), min(x1, n_columns))
    a0, a1 = top // _BAND, -(-(top + rows) // _BAND)
    parts = -(-(a1 - a0) * _BAND * span * band * channels // _MAX_MULTIPLICATIONS)
    part_rows = -(-(a1 - a0) // parts) * _BAND
    mid = _scratch("mid", parts * part_rows, x1 - x0, channels)
    mid[:, : inside.start - x0] = 0
    mid[:, inside.stop - x0 :] = 0
    mid = mid.reshape(parts * part_rows // _BAND, _BAND, -1)
    inner = mid[:, :, (inside.start - x0) * channels : (inside.stop - x0) * channels]

    # Wv @ image
    reads, down = (array[a0:a1] for array in _vertical(n_rows, height))
    _multiply_rows(down, reads, image[:, inside], out=inner)

    # ... @ Wh^T, with the bands and the parts as the axes of a batch
    line = (x1 - x0) * channels
    views = np.ndarray(
        (b1 - b0, parts, part_rows, span),
        np.float32,
        buffer=mid,
        strides=(4 * step * channels, 4 * part_rows * line, 4 * line, 4),
    )
    out = _scratch("out", parts, part_rows, b1 - b0, band * channels)
    np.matmul(views, across[:, None], out=out.transpose(2, 0, 1, 3))

    skip = (left - b0 * band) * channels
    out = out.reshape(parts * part_rows, -1)[top - a0 * _BAND :][:rows, skip : skip + columns * channels]
    # The average of uint8 values rounds into [0, 255] without clipping.
    return np.rint(out, out=out).astype(np.uint8).reshape(rows, columns, channels)


def _multiply_rows(down: np.ndarray, reads: np.ndarray, image: np.ndarray, out: np.ndarray) -> None:
    """Write the products of the bands `down` [N, _BAND, w] and the rows `reads` [N, w] of an image [H, W, C] to `out`
    [N, _BAND, W * C]."""
    channels = image.shape[2]
    step = max(1, _MAX_MULTIPLICATIONS // down[0].size)  # values of a row in a product
    for a in range(0, len(down), _ROWS_PER_GATHER // _BAND):
        part = slice(a, min(a + _ROWS_PER_GATHER // _BAND, len(down)))
        gather_width = max(1, MAX_GATHERED_VALUES // (reads[part].size * channels))  # of a huge picture
        for begin in range(0, image.shape[1], gather_width):
            gathered = image[:, begin : begin + gather_width][reads[part]]
            tall = _scratch("tall", *reads[part].shape, gathered.shape[2] * channels)
            tall[:] = gathered.reshape(tall.shape)
            columns = out[part, :, begin * channels : begin * channels + tall.shape[2]]
            for x in range(0, tall.shape[2], step):
                np.matmul(down[part], tall[:, :, x : x + step], out=columns[:, :, x : x + step])


def _scratch(name: str, *shape: int) -> np.ndarray:
    """Return this thread's float32 buffer, reused since new memory pages cost as much as the products."""
    size, buffers = math.prod(shape), _local.__dict__
    if name not in buffers or buffers[name].size < size:
        buffers[name] = np.empty(size, np.float32)
    return buffers[name][:size].reshape(shape)
