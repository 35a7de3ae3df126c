"""AdamW of many tensors as one Triton kernel, for GPUs: `moments.adamw_`, and the sum that StableAdamW needs.

Tensor by tensor, a step of hundreds of tensors is thousands of kernels of a few microseconds each. Here a program takes
a piece of one tensor, whose place it finds in a table of addresses; moments in 16 bits are unpacked and packed again on
their way. A step reads and writes everything once.

Each number is computed as `moments.adamw_` and `numerics/formats.py` compute it, with quotients and roots that are
rounded correctly. This file is imported where there is a GPU. Without one, tests run it under Triton's interpreter and
compile it ahead of time.

Shapes: n tensors, of which programs take pieces of `_PIECE` values.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false
# Triton turns what its functions are given into constants.

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from limner.numerics.formats import E6M9, UE6M10, FloatFormat

_BLOCK = 512
_BLOCKS = 64
_PIECE = _BLOCK * _BLOCKS
_ALIGNED = 16  # bytes that a thread reads and writes at once, where all tensors begin at a multiple of it


class _Table:
    """Addresses, sizes and programs of tensors: lists of tensors of one size each, moments last."""

    def __init__(self, *lists: Sequence[Tensor]) -> None:
        device, columns = lists[0][0].device, [*zip(*lists, strict=True)]
        sizes = [x[0].numel() for x in columns]
        pieces = [-(-size // _PIECE) for size in sizes]
        firsts = [0, *accumulate(pieces)]
        addresses = [[x.data_ptr() for x in tensors] for tensors in columns]
        owners = torch.arange(len(sizes)).repeat_interleave(torch.tensor(pieces))
        self.programs = firsts[-1]
        self.aligned = all(address % _ALIGNED == 0 for some in addresses for address in some)
        self.packed = not lists[-1][0].is_floating_point()
        rows = [[*some, size, first] for some, size, first in zip(addresses, sizes, firsts[:-1], strict=True)]
        self.rows, self.owners = _to(torch.tensor(rows), device), _to(owners.int(), device)
        self.lengths = _to(torch.tensor(pieces), device)


def adamw_(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    variances: Sequence[Tensor],
    *,
    rates: Sequence[float] | Tensor,
    betas: tuple[float, Sequence[float]],
    corrections: tuple[Sequence[float], Sequence[float]],
    eps: float,
    weight_decay: float,
    most: float = inf,
) -> None:
    """As `moments.adamw_`; moments may be codes, all or none."""
    table, (beta1, beta2) = _Table(parameters, gradients, means, variances), betas
    device = table.rows.device
    if table.programs:
        if not isinstance(rates, Tensor):
            rates = _to(torch.tensor(rates, dtype=torch.float32), device)
        own = torch.tensor([beta2, [1 - beta for beta in beta2], *corrections], dtype=torch.float32)
        launch: Any = adamw_kernel[(table.programs,)]
        launch(
            table.rows, table.owners, rates, _to(own, device), len(beta2), 1 - beta1, eps, weight_decay, most,
            PACKED=table.packed, BLOCK=_BLOCK, BLOCKS=_BLOCKS, ALIGNED=_ALIGNED if table.aligned else 1,
            enable_fp_fusion=False,
        )  # fmt: skip


def sums_of_ratios(
    gradients: Sequence[Tensor], variances: Sequence[Tensor], beta2: float, floors: Sequence[float]
) -> Tensor:
    """The sum of g^2 / max(beta2 v + (1 - beta2) g^2, floor) of each tensor, fp32 [n]; variances may be codes."""
    table = _Table(gradients, variances)
    parts = torch.zeros(table.programs, dtype=torch.float32, device=table.rows.device)
    if table.programs:
        launch: Any = ratios_kernel[(table.programs,)]
        launch(
            table.rows, table.owners, _to(torch.tensor(floors, dtype=torch.float32), parts.device), parts, beta2,
            1 - beta2, PACKED=table.packed, BLOCK=_BLOCK, BLOCKS=_BLOCKS, ALIGNED=_ALIGNED if table.aligned else 1,
            enable_fp_fusion=False,
        )  # fmt: skip
    return torch.segment_reduce(parts, "sum", lengths=table.lengths, initial=0.0, unsafe=True)  # asks no device


def _to(x: Tensor, device: torch.device) -> Tensor:
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


def _constants(of: FloatFormat) -> tuple[int, ...]:
    return of.sign, of.mantissa, of.lowest, of.largest


_MEAN, _VARIANCE = (tl.constexpr(_constants(of)) for of in (E6M9, UE6M10))


@triton.jit
def _unpacked(codes, OF: tl.constexpr):
    """fp32 of codes: `FloatFormat._decoded` of formats with 16 bits."""
    SIGN: tl.constexpr = OF[0]
    M: tl.constexpr = OF[1]
    LOWEST: tl.constexpr = OF[2]
    codes = codes.to(tl.int32)
    number = codes & (0x7FFF if SIGN else 0xFFFF)
    exponent = tl.maximum(number >> M, 1)
    significand = number - ((exponent - 1) << M)
    scale = ((exponent + (LOWEST - 1 - M)) << 23).to(tl.float32, bitcast=True)
    x = significand.to(tl.float32) * scale
    if SIGN:
        x = tl.where(codes < 0, -x, x)
    return x


@triton.jit
def _packed(x, OF: tl.constexpr):
    """Codes of fp32: `FloatFormat._encoded` of formats with 16 bits, to the nearest."""
    SIGN: tl.constexpr = OF[0]
    M: tl.constexpr = OF[1]
    LOWEST: tl.constexpr = OF[2]
    LARGEST: tl.constexpr = OF[3]
    SHIFT: tl.constexpr = 23 - OF[1]
    bits = x.to(tl.int32, bitcast=True)
    if SIGN:
        magnitude = tl.minimum(bits & 0x7FFFFFFF, LARGEST)
    else:
        magnitude = tl.minimum(tl.maximum(bits, 0), LARGEST)
    exponent = tl.maximum(magnitude & 0x7F800000, LOWEST << 23)
    adder = exponent + (SHIFT << 23)
    total = magnitude.to(tl.float32, bitcast=True) + adder.to(tl.float32, bitcast=True)
    codes = total.to(tl.int32, bitcast=True) - adder + (exponent >> SHIFT) - (LOWEST << M)
    if SIGN:
        codes = codes | (bits & -0x80000000) >> 16
    return codes.to(tl.int16)


@triton.jit
def _read(x, at, there, OF: tl.constexpr, PACKED: tl.constexpr):
    kept = tl.load(x + at, mask=there)
    return _unpacked(kept, OF) if PACKED else kept


@triton.jit
def _pointer(rows, row, COLUMN: tl.constexpr, COLUMNS: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    return tl.multiple_of(tl.load(rows + row * COLUMNS + COLUMN).to(tl.pointer_type(TYPE)), ALIGNED)


@triton.jit
def _there(at, size, WHOLE: tl.constexpr):
    """Of a whole piece everything: what is read without a mask is read 16 bytes at once."""
    return tl.full((at.shape[0],), True, tl.int1) if WHOLE else at < size


@triton.jit
def _update(
    p, g, m, v, at, size, WHOLE: tl.constexpr, rate, grow, beta2, new, c1, c2, eps, decay, most, PACKED: tl.constexpr
):  # fmt: skip
    MEAN: tl.constexpr = _MEAN
    VARIANCE: tl.constexpr = _VARIANCE
    there = _there(at, size, WHOLE)
    weight = tl.load(p + at, mask=there)
    gradient = tl.load(g + at, mask=there)
    mean = _read(m, at, there, MEAN, PACKED)
    variance = _read(v, at, there, VARIANCE, PACKED)
    far = gradient - mean
    mean = tl.where(grow < 0.5, mean + grow * far, gradient - far * (1.0 - grow))  # as torch's lerp
    variance = variance * beta2 + new * (gradient * gradient)
    variance = tl.where(variance > most, most, variance)  # NaN stays
    below = (tl.sqrt_rn(tl.div_rn(variance, c2)) + eps) * c1
    update = tl.div_rn(mean, below) + weight * decay
    tl.store(p + at, weight - update * rate, mask=there)
    if PACKED:
        tl.store(m + at, _packed(mean, MEAN), mask=there)
        tl.store(v + at, _packed(variance, VARIANCE), mask=there)
    else:
        tl.store(m + at, mean, mask=there)
        tl.store(v + at, variance, mask=there)


@triton.jit
def adamw_kernel(
    rows, owners, rates, own, n, grow, eps, decay, most,
    PACKED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One program for each piece. `rows` [n, 6]: addresses of weights, gradients, means and variances, the size, and
    the first program; `own` [4, n]: beta2, 1 - beta2, and the two corrections of the bias."""
    KEPT: tl.constexpr = tl.int16 if PACKED else tl.float32
    program = tl.program_id(0)
    i = tl.load(owners + program)
    p = _pointer(rows, i, 0, 6, tl.float32, ALIGNED)
    g = _pointer(rows, i, 1, 6, tl.float32, ALIGNED)
    m = _pointer(rows, i, 2, 6, KEPT, ALIGNED)
    v = _pointer(rows, i, 3, 6, KEPT, ALIGNED)
    size = tl.load(rows + i * 6 + 4)
    start = (program - tl.load(rows + i * 6 + 5)) * (BLOCK * BLOCKS)
    rate, beta2, new = tl.load(rates + i), tl.load(own + i), tl.load(own + n + i)
    c1, c2 = tl.load(own + 2 * n + i), tl.load(own + 3 * n + i)
    if start + BLOCK * BLOCKS <= size:
        for block in range(BLOCKS):
            at = start + block * BLOCK + tl.arange(0, BLOCK)
            _update(p, g, m, v, at, size, True, rate, grow, beta2, new, c1, c2, eps, decay, most, PACKED)
    else:
        for last in range(tl.cdiv(size - start, BLOCK)):
            at = start + last * BLOCK + tl.arange(0, BLOCK)
            _update(p, g, m, v, at, size, False, rate, grow, beta2, new, c1, c2, eps, decay, most, PACKED)


@triton.jit
def _ratios(g, v, at, size, WHOLE: tl.constexpr, floor, beta2, new, PACKED: tl.constexpr):
    VARIANCE: tl.constexpr = _VARIANCE
    there = _there(at, size, WHOLE)
    gradient = tl.load(g + at, mask=there)
    square = gradient * gradient
    variance = beta2 * _read(v, at, there, VARIANCE, PACKED) + new * square
    variance = tl.where(variance < floor, floor, variance)  # NaN stays
    return tl.where(there, tl.div_rn(square, variance), 0.0)


@triton.jit
def ratios_kernel(
    rows, owners, floors, parts, beta2, new,
    PACKED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One program for each piece, which gives its sum. `rows` [n, 4]: addresses of gradients and variances, the size,
    and the first program."""
    KEPT: tl.constexpr = tl.int16 if PACKED else tl.float32
    program = tl.program_id(0)
    i = tl.load(owners + program)
    g = _pointer(rows, i, 0, 4, tl.float32, ALIGNED)
    v = _pointer(rows, i, 1, 4, KEPT, ALIGNED)
    size = tl.load(rows + i * 4 + 2)
    start = (program - tl.load(rows + i * 4 + 3)) * (BLOCK * BLOCKS)
    floor = tl.load(floors + i)
    sums = tl.zeros((BLOCK,), tl.float32)
    if start + BLOCK * BLOCKS <= size:
        for block in range(BLOCKS):
            at = start + block * BLOCK + tl.arange(0, BLOCK)
            sums += _ratios(g, v, at, size, True, floor, beta2, new, PACKED)
    else:
        for last in range(tl.cdiv(size - start, BLOCK)):
            at = start + last * BLOCK + tl.arange(0, BLOCK)
            sums += _ratios(g, v, at, size, False, floor, beta2, new, PACKED)
    tl.store(parts + program, tl.sum(sums, 0))
