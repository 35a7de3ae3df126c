"""AdamW of many tensors as one Triton kernel, for GPUs: `adam_base.adamw_`, and the sum that StableAdamW needs.

Updating hundreds of tensors one at a time launches thousands of kernels of a few microseconds each. Here each program
updates one piece of a tensor, which it finds in a table of addresses, and converts 16-bit moments in registers. A step
reads and writes every value once.

Results equal those of `adam_base.adamw_` and `numerics/formats.py`, with correctly rounded quotients and roots. The
module is imported only where Triton runs. Without a GPU, tests run it in Triton's interpreter and compile it ahead of
time.

Shapes: n tensors, cut into pieces of `_PIECE` values.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false
# Triton converts `tl.constexpr` arguments itself.

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from limner.numerics.formats import E6M9, UE6M10

BLOCK_VALUES = 512
BLOCKS_PER_PROGRAM = 64
_PIECE = BLOCK_VALUES * BLOCKS_PER_PROGRAM
_ALIGNMENT = 16  # bytes of a vectorized access, possible where all tensors start at a multiple of it


class _Table:
    """Addresses, sizes and programs of n tensors. Each list has one tensor of each; moments come last."""

    def __init__(self, *lists: Sequence[Tensor]) -> None:
        device, columns = lists[0][0].device, [*zip(*lists, strict=True)]
        sizes = [x[0].numel() for x in columns]
        pieces = [-(-size // _PIECE) for size in sizes]
        firsts = [0, *accumulate(pieces)]
        addresses = [[x.data_ptr() for x in tensors] for tensors in columns]
        owners = torch.arange(len(sizes)).repeat_interleave(torch.tensor(pieces))
        self.programs = firsts[-1]
        self.aligned = all(address % _ALIGNMENT == 0 for row in addresses for address in row)
        self.quantized = not lists[-1][0].is_floating_point()
        rows = [[*row, size, first] for row, size, first in zip(addresses, sizes, firsts[:-1], strict=True)]
        self.rows, self.owners = _to(torch.tensor(rows), device), _to(owners.int(), device)
        self.lengths = _to(torch.tensor(pieces), device)

    def launch(self, kernel: Any, *arguments: Any) -> None:
        if self.programs:
            kernel[(self.programs,)](
                self.rows, self.owners, *arguments, QUANTIZED=self.quantized, BLOCK=BLOCK_VALUES,
                BLOCKS=BLOCKS_PER_PROGRAM, ALIGNED=_ALIGNMENT if self.aligned else 1, enable_fp_fusion=False,
            )  # fmt: skip


def adamw_(
    tensors: Sequence[Sequence[Tensor]],
    lrs: Sequence[float] | Tensor,
    coefficients: tuple[float, Sequence[float], Sequence[float], Sequence[float]],
    eps: float,
    weight_decay: float,
    max_exp_avg_sq: float = inf,
) -> None:
    """Update as `adam_base.adamw_` does. `tensors` are weights, gradients, means and variances; moments are all numbers
    or all codes."""
    table, (beta1, beta2, c1, c2) = _Table(*tensors), coefficients
    if not isinstance(lrs, Tensor):
        lrs = _to(torch.tensor(lrs, dtype=torch.float32), table.rows.device)
    rows = torch.tensor([beta2, [1 - beta for beta in beta2], c1, c2], dtype=torch.float32)
    rows = _to(rows, table.rows.device)
    table.launch(adamw_kernel, lrs, rows, len(beta2), 1 - beta1, eps, weight_decay, max_exp_avg_sq)


def sums_of_ratios(
    grads: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor], beta2: float, floors: Sequence[float]
) -> Tensor:
    """Sum of g^2 / max(beta2 v + (1 - beta2) g^2, floor) over each tensor, fp32 [n]. Variances may be codes."""
    table = _Table(grads, exp_avg_sqs)
    parts = torch.zeros(table.programs, dtype=torch.float32, device=table.rows.device)
    floors_on_device = _to(torch.tensor(floors, dtype=torch.float32), parts.device)
    table.launch(ratios_kernel, floors_on_device, parts, beta2, 1 - beta2)
    return torch.segment_reduce(parts, "sum", lengths=table.lengths, initial=0.0, unsafe=True)  # no synchronization


def _to(x: Tensor, device: torch.device) -> Tensor:
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


_MEAN, _VARIANCE = (
    tl.constexpr((form.sign, form.mantissa, form.min_exponent_field, form.max_bits)) for form in (E6M9, UE6M10)
)


@triton.jit
def _decode(codes, FORM: tl.constexpr):
    """Codes to fp32: `FloatFormat.decode` for 16-bit formats."""
    SIGN: tl.constexpr = FORM[0]
    M: tl.constexpr = FORM[1]
    LOWEST: tl.constexpr = FORM[2]
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
def _encode(x, FORM: tl.constexpr):
    """fp32 to codes, rounded to nearest: `FloatFormat.encode` for 16-bit formats."""
    SIGN: tl.constexpr = FORM[0]
    M: tl.constexpr = FORM[1]
    LOWEST: tl.constexpr = FORM[2]
    LARGEST: tl.constexpr = FORM[3]
    SHIFT: tl.constexpr = 23 - FORM[1]
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
def _read(x, offsets, mask, FORM: tl.constexpr, QUANTIZED: tl.constexpr):
    stored = tl.load(x + offsets, mask=mask)
    return _decode(stored, FORM) if QUANTIZED else stored


@triton.jit
def _pointer(rows, row, COLUMN: tl.constexpr, COLUMNS: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    return tl.multiple_of(tl.load(rows + row * COLUMNS + COLUMN).to(tl.pointer_type(TYPE)), ALIGNED)


@triton.jit
def _mask(offsets, size, WHOLE: tl.constexpr):
    """Mask of valid offsets, constant for whole pieces: accesses without a mask are 16 bytes wide."""
    return tl.full((offsets.shape[0],), True, tl.int1) if WHOLE else offsets < size


@triton.jit
def _update(
    p, g, m, v, offsets, size, WHOLE: tl.constexpr, lr, w1, beta2, w2, c1, c2, eps, decay, v_max,
    QUANTIZED: tl.constexpr,
):  # fmt: skip
    MEAN: tl.constexpr = _MEAN
    VARIANCE: tl.constexpr = _VARIANCE
    mask = _mask(offsets, size, WHOLE)
    weight = tl.load(p + offsets, mask=mask)
    gradient = tl.load(g + offsets, mask=mask)
    mean = _read(m, offsets, mask, MEAN, QUANTIZED)
    variance = _read(v, offsets, mask, VARIANCE, QUANTIZED)
    difference = gradient - mean
    mean = tl.where(w1 < 0.5, mean + w1 * difference, gradient - difference * (1.0 - w1))  # torch's lerp
    variance = variance * beta2 + w2 * (gradient * gradient)
    variance = tl.where(variance > v_max, v_max, variance)  # NaN stays
    denominator = (tl.sqrt_rn(tl.div_rn(variance, c2)) + eps) * c1
    update = tl.div_rn(mean, denominator) + weight * decay
    tl.store(p + offsets, weight - update * lr, mask=mask)
    if QUANTIZED:
        tl.store(m + offsets, _encode(mean, MEAN), mask=mask)
        tl.store(v + offsets, _encode(variance, VARIANCE), mask=mask)
    else:
        tl.store(m + offsets, mean, mask=mask)
        tl.store(v + offsets, variance, mask=mask)


@triton.jit
def adamw_kernel(
    rows, owners, lrs, coefficients, n, w1, eps, decay, v_max,
    QUANTIZED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Update one piece per program. `rows` [n, 6]: addresses of weights, gradients, means and variances, the size and
    the first program. `coefficients` [4, n]: beta2, w2 = 1 - beta2, c1, c2 (bias corrections). w1 = 1 - beta1."""
    MOMENT: tl.constexpr = tl.int16 if QUANTIZED else tl.float32
    program = tl.program_id(0)
    i = tl.load(owners + program)
    p = _pointer(rows, i, 0, 6, tl.float32, ALIGNED)
    g = _pointer(rows, i, 1, 6, tl.float32, ALIGNED)
    m = _pointer(rows, i, 2, 6, MOMENT, ALIGNED)
    v = _pointer(rows, i, 3, 6, MOMENT, ALIGNED)
    size = tl.load(rows + i * 6 + 4)
    start = (program - tl.load(rows + i * 6 + 5)) * (BLOCK * BLOCKS)
    lr, beta2, w2 = tl.load(lrs + i), tl.load(coefficients + i), tl.load(coefficients + n + i)
    c1, c2 = tl.load(coefficients + 2 * n + i), tl.load(coefficients + 3 * n + i)
    if start + BLOCK * BLOCKS <= size:
        for block in range(BLOCKS):
            offsets = start + block * BLOCK + tl.arange(0, BLOCK)
            _update(p, g, m, v, offsets, size, True, lr, w1, beta2, w2, c1, c2, eps, decay, v_max, QUANTIZED)
    else:
        for tail in range(tl.cdiv(size - start, BLOCK)):  # not `block`: Triton merges types of one name over branches
            offsets = start + tail * BLOCK + tl.arange(0, BLOCK)
            _update(p, g, m, v, offsets, size, False, lr, w1, beta2, w2, c1, c2, eps, decay, v_max, QUANTIZED)


@triton.jit
def _ratios(g, v, offsets, size, WHOLE: tl.constexpr, floor, beta2, w2, QUANTIZED: tl.constexpr):
    VARIANCE: tl.constexpr = _VARIANCE
    mask = _mask(offsets, size, WHOLE)
    gradient = tl.load(g + offsets, mask=mask)
    square = gradient * gradient
    variance = beta2 * _read(v, offsets, mask, VARIANCE, QUANTIZED) + w2 * square
    variance = tl.where(variance < floor, floor, variance)  # NaN stays
    return tl.where(mask, tl.div_rn(square, variance), 0.0)


@triton.jit
def ratios_kernel(
    rows, owners, floors, parts, beta2, w2,
    QUANTIZED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Sum ratios over one piece per program. `rows` [n, 4]: addresses of gradients and variances, the size and the
    first program."""
    MOMENT: tl.constexpr = tl.int16 if QUANTIZED else tl.float32
    program = tl.program_id(0)
    i = tl.load(owners + program)
    g = _pointer(rows, i, 0, 4, tl.float32, ALIGNED)
    v = _pointer(rows, i, 1, 4, MOMENT, ALIGNED)
    size = tl.load(rows + i * 4 + 2)
    start = (program - tl.load(rows + i * 4 + 3)) * (BLOCK * BLOCKS)
    floor = tl.load(floors + i)
    sums = tl.zeros((BLOCK,), tl.float32)
    if start + BLOCK * BLOCKS <= size:
        for block in range(BLOCKS):
            offsets = start + block * BLOCK + tl.arange(0, BLOCK)
            sums += _ratios(g, v, offsets, size, True, floor, beta2, w2, QUANTIZED)
    else:
        for tail in range(tl.cdiv(size - start, BLOCK)):
            offsets = start + tail * BLOCK + tl.arange(0, BLOCK)
            sums += _ratios(g, v, offsets, size, False, floor, beta2, w2, QUANTIZED)
    tl.store(parts + program, tl.sum(sums, 0))
