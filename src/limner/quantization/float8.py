"""Linear layers that train with 8-bit floating point (Wortsman et al. 2023, §2.2.1 "float8", §2.3).

                       input, weight (e4m3)    gradient (e5m2)    weight gradient
    Fp8SwitchBack      by row, one scale       by row             16 bits
    Fp8TensorWise      one scale each          one scale          8 bits

e4m3 has four bits of exponent and three of mantissa, e5m2 five and two: inputs and weights need precision, gradients
need range (Micikevicius et al. 2022, which the paper follows). x / absmax is scaled to the format's largest number, to
use the whole range, and rounded to the nearest number of the format, ties to even.

GPUs from compute capability 8.9 on multiply float8 (`torch._scaled_mm`). On other hardware the product is computed in
bf16 or fp32, which hold each float8 number exactly, and summed in fp32: the paper's simulation. It reproduces the
accuracy of float8 training, not its speed.

Shapes: b rows, n inputs, m outputs. `weight` is [m, n].
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from limner import compat
from limner.numerics import precision
from limner.quantization.int8 import row_major
from limner.quantization.kernel_counter import Product, count_product
from limner.quantization.low_precision import (
    Gradients,
    LowPrecisionLinear,
    SaveInputs,
    bias_gradient,
    once_differentiable,
    weight_gradient,
)
from limner.quantization.scales import scale_and_inverse
from limner.quantization.vmap_loop import vmap_by_loop

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def round_to_float8(x: Float[Tensor, ...], format: torch.dtype) -> Float[Tensor, ...]:
    """Round x to the nearest number of a float8 format, clamped to its range; NaN stays NaN."""
    largest = torch.finfo(format).max
    return x.float().clamp(-largest, largest).to(format)


def row_wise(x: Float[Tensor, "m n"], format: torch.dtype) -> tuple[Float[Tensor, "m n"], Float[Tensor, " m"]]:
    """Quantize each row with a separate scale: float8 [m, n], fp32 [m]."""
    scale, inverse = scale_and_inverse(x.abs().amax(1), torch.finfo(format).max)
    return round_to_float8(x * inverse[:, None], format), scale


def tensor_wise(x: Float[Tensor, "m n"], format: torch.dtype) -> tuple[Float[Tensor, "m n"], Float[Tensor, ""]]:
    """Quantize the matrix with one scale: float8 [m, n], fp32 []."""
    scale, inverse = scale_and_inverse(x.abs().amax(), torch.finfo(format).max)
    return round_to_float8(x.float() * inverse, format), scale


def product(
    a: Float[Tensor, "m k"],
    b: Float[Tensor, "n k"],
    scale_a: Float[Tensor, ...],
    scale_b: Float[Tensor, ...],
    bias: Float[Tensor, " n"] | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    counter: Tensor | None = None,
    role: Product = "forward",
) -> Float[Tensor, "m n"]:
    """Return scale_a scale_b^T * (a b^T) + bias, [m, n] in `dtype`, as `int8.product` for float8 matrices."""
    return _product(a, b, scale_a, scale_b, bias, dtype, counter, role)


def select_kernel(a: Tensor, b: Tensor) -> tuple[str, str]:
    """Return the name of the kernel for a b^T, and why it is not the float8 one ("" if it is)."""
    if not a.is_cuda or torch.cuda.get_device_capability(a.device) < (8, 9):
        return "simulated", "this device cannot multiply float8"
    if a.shape[1] % 16 or len(b) % 16:
        return "simulated", "_scaled_mm needs multiples of 16"
    return "_scaled_mm", ""


@vmap_by_loop
@torch.library.custom_op("limner::fp8_product", mutates_args=())
def _product(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    counter: Tensor | None,
    role: str,
) -> Tensor:
    chosen, reason = select_kernel(a, b)
    count_product(counter, role, chosen, reason)
    if chosen == "simulated":
        matmul_dtype = precision.Auto().dtype(a.device)
        with torch.autocast(a.device.type, enabled=False):
            y = precision.product(a.to(matmul_dtype), b.to(matmul_dtype).mT)
        y = y * (scale_a[:, None] if scale_a.ndim else scale_a) * scale_b
    elif scale_a.ndim or scale_b.ndim:  # `_scaled_mm` then needs row scales of both and gives bf16
        by_row, by_column = scale_a.expand(len(a)).contiguous(), scale_b.expand(len(b)).contiguous()
        y = compat.scaled_mm(row_major(a), row_major(b).mT, by_row[:, None], by_column[None], out_dtype=torch.bfloat16)
    else:
        y = compat.scaled_mm(row_major(a), row_major(b).mT, scale_a, scale_b, out_dtype=dtype)
    return (y if bias is None else y + bias).to(dtype)


@_product.register_fake
def _(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: object, dtype: torch.dtype, counter: object, role: str
) -> Tensor:
    return a.new_empty(len(a), len(b), dtype=dtype)


class _Fp8SwitchBack(SaveInputs):
    """Algorithm 1 with float8cast(x / absmax) instead of round(127 x / absmax)."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, counter: Tensor) -> Tensor:
        (q, state_x), (w, state_w) = row_wise(x, E4M3), tensor_wise(weight, E4M3)
        return product(q, w, state_x, state_w, bias, x.dtype, counter=counter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Gradients:
        x, weight, counter = ctx.saved_tensors
        by_x = by_weight = by_bias = None
        if ctx.needs_input_grad[0]:
            (q, state_g), (w, state_w) = row_wise(g, E5M2), tensor_wise(weight, E4M3)
            by_x = product(q, w.mT, state_g, state_w, None, g.dtype, counter=counter, role="input gradient")
        if ctx.needs_input_grad[1]:
            by_weight = weight_gradient(g, x, weight.dtype, counter)
        if ctx.needs_input_grad[2]:
            by_bias = bias_gradient(g, weight.dtype)
        return by_x, by_weight, by_bias, None


class _Fp8TensorWise(SaveInputs):
    """The baseline of §2.3: inputs, weights and gradients with one scale each, all products in float8."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, counter: Tensor) -> Tensor:
        (q, state_x), (w, state_w) = tensor_wise(x, E4M3), tensor_wise(weight, E4M3)
        return product(q, w, state_x, state_w, bias, x.dtype, counter=counter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Gradients:
        x, weight, counter = ctx.saved_tensors
        values, state_g = tensor_wise(g, E5M2)
        by_x = by_weight = by_bias = None
        if ctx.needs_input_grad[0]:
            w, state_w = tensor_wise(weight, E4M3)
            by_x = product(values, w.mT, state_g, state_w, None, g.dtype, counter=counter, role="input gradient")
        if ctx.needs_input_grad[1]:
            q, state_x = tensor_wise(x, E4M3)
            by_weight = product(
                values.mT, q.mT, state_g, state_x, None, weight.dtype, counter=counter, role="weight gradient"
            )
        if ctx.needs_input_grad[2]:
            by_bias = bias_gradient(g, weight.dtype)
        return by_x, by_weight, by_bias, None


class Fp8SwitchBackLinear(LowPrecisionLinear):
    """`nn.Linear` in float8, with the weight gradient in 16 bits."""

    function = _Fp8SwitchBack


class Fp8TensorWiseLinear(LowPrecisionLinear):
    """`nn.Linear` with all products in float8, one scale per matrix: the baseline that diverges in large models."""

    function = _Fp8TensorWise
