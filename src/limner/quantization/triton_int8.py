"""The steps of an int8 linear layer as Triton kernels (Wortsman et al. 2023, §2.2.1, Algorithm 1), for GPUs.

    row_wise    absmax, scale and integers of each row, in one kernel
    quantize    integers of a whole matrix or of its transpose: a tile is read once and written transposed
                (`tensor-wise_quantize_transpose`). GPUs multiply only A B^T, so the gradient needs W transposed
    product     a b^T in int32 on tensor cores, with scales and bias applied before the result is written

Each kernel does the fp32 operations of `quantize.py` and `products.py` in the same order: quotients are rounded
correctly (`div_rn`), and products are not fused with additions (`enable_fp_fusion=False`), so that all devices give the
same integers. Rounding to nearest even adds and subtracts 1.5 * 2^23, where fp32 steps by integers.

This module is imported only with a GPU, or by tests under Triton's interpreter.

Shapes: m rows of inputs, n of weights, k summed over.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from limner.numerics.formats import INT8_MAX, MIN_ABSMAX

_INT8_MAX = tl.constexpr(INT8_MAX)
_MIN_ABSMAX = tl.constexpr(MIN_ABSMAX)
_ROUNDING_OFFSET = tl.constexpr(1.5 * 2**23)
_GROUP_ROWS = tl.constexpr(8)  # rows of tiles in a group
_TILE = 64


def row_wise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 [m, n] and fp32 scales [m] of the rows of x [m, n]."""
    m, n = x.shape
    values = torch.empty(m, n, dtype=torch.int8, device=x.device)
    scale = torch.empty(m, dtype=torch.float32, device=x.device)
    if x.numel():
        block = min(4_096, triton.next_power_of_2(n))
        launch: Any = row_wise_kernel[(m,)]
        launch(x, values, scale, n, *x.stride(), *values.stride(), BLOCK=block, enable_fp_fusion=False)
    return values, scale


def quantize(x: Tensor, inverse: Tensor, transposed: bool = False) -> Tensor:
    """Return int8 [m, n] of x [m, n] times a scale's inverse, fp32 []; [n, m] if `transposed`."""
    m, n = x.shape
    values = torch.empty((n, m) if transposed else (m, n), dtype=torch.int8, device=x.device)
    strides = values.mT.stride() if transposed else values.stride()
    if x.numel():
        launch: Any = quantize_kernel[triton.cdiv(m, _TILE), triton.cdiv(n, _TILE)]
        launch(x, values, inverse, m, n, *x.stride(), *strides, TILE=_TILE, enable_fp_fusion=False)
    return values


def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return `products.product` of int8 matrices. Tensor cores read both matrices along k."""
    b = b.contiguous()
    (m, k), n = a.shape, len(b)
    y = torch.empty(m, n, dtype=dtype, device=a.device)
    if not y.numel():
        return y

    def grid(config: dict[str, Any]) -> tuple[int]:
        return (triton.cdiv(m, config["M"]) * triton.cdiv(n, config["N"]),)

    product_kernel[grid](
        a, b, y, scale_a, scale_b, scale_a if bias is None else bias, m, n, k, *a.stride(), *b.stride(), y.stride(0),
        BY_ROW=scale_a.ndim == 1, BY_COLUMN=scale_b.ndim == 1, BIAS=bias is not None, EVEN=k % _MAX_BLOCK_K == 0,
    )  # fmt: skip
    return y


@triton.jit
def _round(x):
    return (x + _ROUNDING_OFFSET) - _ROUNDING_OFFSET


@triton.jit
def _magnitude(x):
    """Return |x|, or infinity for NaN, which a maximum may ignore."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def row_wise_kernel(x, values, scale, n, x_row, x_column, v_row, v_column, BLOCK: tl.constexpr):
    """One program for each row, which it reads twice, the second time from the cache."""
    row = tl.program_id(0).to(tl.int64)
    x, values = x + row * x_row, values + row * v_row
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        part = tl.load(x + columns.to(tl.int64) * x_column, mask=columns < n, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, _magnitude(part))
    absmax = tl.maximum(tl.max(largest, 0), _MIN_ABSMAX)
    tl.store(scale + row, tl.div_rn(absmax, _INT8_MAX * 1.0))
    inverse = tl.div_rn(_INT8_MAX * 1.0, absmax)
    for start in range(0, n, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        part = tl.load(x + columns.to(tl.int64) * x_column, mask=columns < n, other=0.0).to(tl.float32)
        tl.store(values + columns.to(tl.int64) * v_column, _round(part * inverse).to(tl.int8), mask=columns < n)


@triton.jit
def quantize_kernel(x, values, inverse, m, n, x_row, x_column, v_row, v_column, TILE: tl.constexpr):
    """One program for each tile."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None]
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)[None, :]
    in_bounds = (row < m) & (column < n)
    tile = tl.load(x + row * x_row + column * x_column, mask=in_bounds, other=0.0).to(tl.float32)
    quantized = _round(tile * tl.load(inverse)).to(tl.int8)
    tl.store(values + row * v_row + column * v_column, quantized, mask=in_bounds)


_CONFIGS = [
    triton.Config({"M": m, "N": n, "K": k}, num_warps=warps, num_stages=stages)
    for m, n, k, warps, stages in (
        (64, 64, 64, 4, 3),
        (64, 128, 64, 4, 4),
        (128, 64, 64, 4, 4),
        (128, 128, 64, 4, 4),
        (128, 128, 128, 8, 3),
        (128, 256, 64, 8, 3),
        (128, 256, 128, 8, 3),
        (128, 256, 128, 8, 4),
        (256, 128, 128, 8, 3),
        (256, 128, 128, 8, 4),
    )
]
_MAX_BLOCK_K = 128  # largest K above


@triton.autotune(_CONFIGS[: 1 if knobs.runtime.interpret else None], key=["m", "n", "k"])
@triton.jit
def product_kernel(
    a, b, y, scale_a, scale_b, bias, m, n, k, a_row, a_column, b_row, b_column, y_row,
    BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """One program for each tile [M, N] of the result; `EVEN` if every K divides k. Concurrent programs compute nearby
    tiles, whose rows and columns share the cache."""
    n_tiles, tile = tl.cdiv(n, N), tl.program_id(0)
    group = tile // (_GROUP_ROWS * n_tiles) * _GROUP_ROWS
    rows = tl.minimum(tl.cdiv(m, M) - group, _GROUP_ROWS)
    within_group = tile % (_GROUP_ROWS * n_tiles)
    row = (group + within_group % rows) * M + tl.arange(0, M)
    column = within_group // rows * N + tl.arange(0, N)
    in_m, in_n, inner = row < m, column < n, tl.arange(0, K)
    # Indices beyond the matrices wrap around to their beginning, and their products are not written.
    a += (row % m).to(tl.int64)[:, None] * a_row + inner.to(tl.int64)[None, :] * a_column
    b += (column % n).to(tl.int64)[None, :] * b_row + inner.to(tl.int64)[:, None] * b_column
    sums = tl.zeros((M, N), tl.int32)
    for start in range(0, k, K):
        if EVEN:
            left, right = tl.load(a), tl.load(b)
        else:
            left = tl.load(a, mask=inner[None, :] < k - start, other=0)
            right = tl.load(b, mask=inner[:, None] < k - start, other=0)
        sums = tl.dot(left, right, sums, out_dtype=tl.int32)
        a += K * a_column
        b += K * b_column
    if BY_ROW:
        by_row = tl.load(scale_a + row, mask=in_m, other=0.0)[:, None]
    else:
        by_row = tl.load(scale_a)
    if BY_COLUMN:
        scaled = sums.to(tl.float32) * by_row * tl.load(scale_b + column, mask=in_n, other=0.0)[None, :]
    else:
        scaled = sums.to(tl.float32) * (by_row * tl.load(scale_b))
    if BIAS:
        scaled += tl.load(bias + column, mask=in_n, other=0.0).to(tl.float32)[None, :]
    y += row.to(tl.int64)[:, None] * y_row + column[None, :]
    tl.store(y, scaled.to(y.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])
