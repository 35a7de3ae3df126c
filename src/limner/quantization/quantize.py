"""Quantization to 8-bit integers with scales (Wortsman et al. 2023, §2.2.1, equation 1).

    q = round(127 / absmax * x)        x is nearly q * scale, scale = absmax / 127

absmax is the largest magnitude of the row, the column or the matrix that shares a scale. Rounding is to the nearest
integer, ties to even, so the error of an entry is at most half its scale. Scales are fp32. The paper stores absmax as
the "state" and divides by 127 in each product; here the division is done once.

Finer scales lose less: one large entry reduces the precision of its row only. But a scale must be constant along the
dimension that a product sums over. So inputs [b, n] and weights [m, n] of x w^T have scales by row, and w in the
gradient g w has scales by column.

A row of zeros stays zeros. A row with infinity or NaN gets a scale that is not finite, so that its products are not
finite either, and training skips the update.

Every backend does the same fp32 operations in the same order, so all give the same integers.

Shapes: m rows, n columns.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from limner.numerics.compile_elementwise import triton_supports
from limner.quantization.scales import INT8, scale_and_inverse
from limner.quantization.vmap_loop import vmap_by_loop

_CPU_VALUES_PER_PART = 1 << 18  # 1 MB in fp32: on a CPU the second pass reads them from the cache


def row_wise(x: Float[Tensor, "m n"]) -> tuple[Int8[Tensor, "m n"], Float[Tensor, " m"]]:
    """Quantize each row with a separate scale: int8 [m, n], fp32 [m]."""
    return _row_wise(x)


def column_wise(x: Float[Tensor, "m n"]) -> tuple[Int8[Tensor, "m n"], Float[Tensor, " n"]]:
    """Quantize each column with a separate scale: int8 [m, n], fp32 [n]. On a GPU the values are column-major, as its
    products require."""
    return _column_wise(x)


def tensor_wise(x: Float[Tensor, "m n"]) -> tuple[Int8[Tensor, "m n"], Float[Tensor, ""]]:
    """Quantize the matrix with one scale: int8 [m, n], fp32 []."""
    return _tensor_wise(x)


def tensor_wise_transposed(x: Float[Tensor, "m n"]) -> tuple[Int8[Tensor, "n m"], Float[Tensor, ""]]:
    """Quantize the transpose with one scale: int8 [n, m], fp32 []. On a GPU, whose products need contiguous rows, the
    same pass over memory transposes; elsewhere the result is a view."""
    return _tensor_wise_transposed(x)


def dequantize(values: Int8[Tensor, "m n"], scale: Float[Tensor, ...]) -> Float[Tensor, "m n"]:
    """Return fp32 numbers from the values and scales of `row_wise` or `tensor_wise`."""
    return values * (scale[:, None] if scale.ndim else scale)


@vmap_by_loop
@torch.library.custom_op("limner::row_wise", mutates_args=())  # opaque to torch.compile, which would unroll the loop
def _row_wise(x: Tensor) -> tuple[Tensor, Tensor]:
    if triton_supports(x):
        from limner.quantization import triton_int8

        return triton_int8.row_wise(x)
    values = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty(len(x), dtype=torch.float32, device=x.device)
    for part, out, part_scale in zip(*(_parts(y, x.shape) for y in (x, values, scale)), strict=True):
        scale_values, inverse = scale_and_inverse(_absmax(part), INT8)
        part_scale.copy_(scale_values)
        out.copy_((part * inverse[:, None]).round_())
    return values, scale


@_row_wise.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[:1], dtype=torch.float32)


@vmap_by_loop
@torch.library.custom_op("limner::column_wise", mutates_args=())
def _column_wise(x: Tensor) -> tuple[Tensor, Tensor]:
    if triton_supports(x):
        from limner.quantization import triton_int8

        values, scale = triton_int8.row_wise(x.mT)
        return values.mT, scale
    scale, inverse = scale_and_inverse(_absmax(x, 0), INT8)
    return _scaled(x, inverse), scale


@_column_wise.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    shape = x.mT.shape if triton_supports(x) else x.shape
    values = x.new_empty(shape, dtype=torch.int8)
    return values.mT if triton_supports(x) else values, x.new_empty(x.shape[1:], dtype=torch.float32)


@vmap_by_loop
@torch.library.custom_op("limner::tensor_wise", mutates_args=())
def _tensor_wise(x: Tensor) -> tuple[Tensor, Tensor]:
    scale, inverse = scale_and_inverse(_absmax(x).amax(), INT8)
    if triton_supports(x):
        from limner.quantization import triton_int8

        return triton_int8.quantize(x, inverse), scale
    return _scaled(x, inverse), scale


@_tensor_wise.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty((), dtype=torch.float32)


@vmap_by_loop
@torch.library.custom_op("limner::tensor_wise_transposed", mutates_args=())
def _tensor_wise_transposed(x: Tensor) -> tuple[Tensor, Tensor]:
    if not triton_supports(x):
        values, scale = _tensor_wise(x)
        return values.mT, scale
    from limner.quantization import triton_int8

    scale, inverse = scale_and_inverse(_absmax(x).amax(), INT8)
    return triton_int8.quantize(x, inverse, transposed=True), scale


@_tensor_wise_transposed.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    values = torch.empty_like(x, dtype=torch.int8, memory_format=torch.contiguous_format).mT
    return values.contiguous() if triton_supports(x) else values, x.new_empty((), dtype=torch.float32)


def _absmax(x: Tensor, dim: int = 1) -> Tensor:
    """Return the largest magnitudes along `dim`, NaN if any entry is. On CPUs two reductions are faster than one."""
    return torch.maximum(x.amax(dim), -x.amin(dim))


def _scaled(x: Tensor, inverse: Tensor) -> Tensor:
    """Return int8 of a matrix times inverse scales, one [] or one for each column [n]."""
    values = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    for part, out in zip(_parts(x, x.shape), _parts(values, x.shape), strict=True):
        out.copy_((part.float() * inverse).round_())
    return values


def _parts(x: Tensor, shape: torch.Size) -> Iterator[Tensor]:
    """Split a matrix of this shape, or a vector with an entry per row, by rows into parts that fit a cache."""
    return iter(x.split(max(1, _CPU_VALUES_PER_PART // max(1, shape[1]))))
