"""Quantization to eight bits with scales (Wortsman et al. 2023, §2.2.1, equation 1 and "float8").

    q = round(largest / absmax * x)        x is nearly q * scale, scale = absmax / largest

`largest` is 127 in int8, and the largest number of a float8 format. absmax is the largest magnitude of the row or the
matrix that shares a scale. Rounding is to the nearest number, ties to even: in int8 the error of an entry is at most
half its scale. Scales are fp32. The paper stores absmax as the "state" and divides by 127 in each product; here the
division is done once.

Finer scales lose less: one large entry reduces the precision of its row only. But a scale must be constant along the
dimension that a product sums over: in x w^T along the rows of x and w, in g w along the rows of g and w^T.

A row of zeros stays zeros. A row with infinity or NaN gets a scale that is not finite, so that its products are not
finite either, and training skips the update. Every backend does the same fp32 operations in the same order, so all give
the same integers.

Shapes: m rows, n columns.
"""

from typing import Any, TypeVar

import torch
from torch import Tensor

from limner.numerics.compile_elementwise import triton_supports
from limner.numerics.formats import INT8_MAX, MIN_ABSMAX

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_CPU_VALUES_PER_PART = 1 << 18  # 1 MB in fp32: on a CPU the second pass reads them from the cache

Op = TypeVar("Op", bound=Any)


def quantize(
    x: Tensor, by_row: bool, format: torch.dtype = torch.int8, transpose: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantize x [m, n] to int8 or a float8 format, with a scale for each row or one scale.

    Args:
        transpose: quantize x^T instead, by rows of x^T. On a GPU, whose products need contiguous rows, the int8 numbers
            are transposed in memory; elsewhere they are a view.

    Returns:
        The numbers [m, n], and fp32 scales [m] or []. With `transpose`, [n, m], and [n] or [].
    """
    if format == torch.int8:
        return _quantize_int8(x, by_row, transpose)
    x = x.mT if transpose else x
    scale, inverse = scale_and_inverse(_absmax(x, 1 if by_row else None), torch.finfo(format).max)
    return round_to_float8(x.float() * inverse, format), scale.flatten() if by_row else scale.reshape(())


def dequantize(values: Tensor, scale: Tensor) -> Tensor:
    """Return fp32 numbers from int8 [m, n] and its scales, [m] or []."""
    return values * (scale[:, None] if scale.ndim else scale)


def scale_and_inverse(absmax: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Return (scale, inverse) in fp32 such that absmax * inverse = `largest`, in the shape of absmax."""
    absmax = absmax.float().clamp_min(MIN_ABSMAX)  # NaN stays NaN
    largest_tensor = torch.full_like(absmax, largest)  # torch divides by a number through a reciprocal, rounded twice
    return absmax / largest_tensor, largest_tensor / absmax


def round_to_float8(x: Tensor, format: torch.dtype) -> Tensor:
    """Round x to the nearest number of a float8 format, clamped to its range; NaN stays NaN."""
    largest = torch.finfo(format).max
    return x.float().clamp(-largest, largest).to(format)


def vmap_by_loop(op: Op) -> Op:
    """Register a loop over the batch as the `vmap` rule of a custom operation, which `vmap` cannot trace, and return
    the operation. Results are stacked along dimension 0."""

    def call_each(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        def element(i: int) -> list[Any]:
            return [x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims, strict=True)]

        results = [op(*element(i)) for i in range(info.batch_size)]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0,) * len(results[0])

    torch.library.register_vmap(op, call_each)
    return op


@vmap_by_loop
@torch.library.custom_op("limner::quantize_int8", mutates_args=())  # opaque to torch.compile, which would unroll loops
def _quantize_int8(x: Tensor, by_row: bool, transpose: bool) -> tuple[Tensor, Tensor]:
    if triton_supports(x):
        from limner.quantization import triton_int8

        if by_row:
            return triton_int8.row_wise(x.mT if transpose else x)
        scale, inverse = scale_and_inverse(_absmax(x, None).reshape(()), INT8_MAX)
        return triton_int8.quantize(x, inverse, transpose), scale
    shared = None  # scale and inverse of all parts
    if transpose or not by_row:
        shared = scale_and_inverse(_absmax(x, 0 if by_row else None), INT8_MAX)
    values, scales = torch.empty(x.shape, dtype=torch.int8, device=x.device), []
    rows = max(1, _CPU_VALUES_PER_PART // max(1, x.shape[1]))
    for part, out in zip(x.split(rows), values.split(rows), strict=True):
        scale, inverse = shared or scale_and_inverse(_absmax(part, 1), INT8_MAX)
        out.copy_((part.float() * inverse).round_())
        scales.append(scale)
    scale = shared[0] if shared else torch.cat(scales)
    return values.mT if transpose else values, scale.flatten() if by_row else scale.reshape(())


@_quantize_int8.register_fake
def _(x: Tensor, by_row: bool, transpose: bool) -> tuple[Tensor, Tensor]:
    values = x.new_empty(x.shape, dtype=torch.int8)
    if transpose:
        values = values.mT.contiguous() if triton_supports(x) else values.mT
    return values, x.new_empty(values.shape[:1] if by_row else (), dtype=torch.float32)


def _absmax(x: Tensor, dim: int | None) -> Tensor:
    """Return the largest magnitudes along a dimension, [m, 1] or [1, n], or of the matrix, [1, 1]; NaN if any entry is.
    On CPUs two reductions are faster than one."""
    if dim is None:
        return _absmax(x, 1).amax(0, keepdim=True)
    return torch.maximum(x.amax(dim, keepdim=True), -x.amin(dim, keepdim=True))
