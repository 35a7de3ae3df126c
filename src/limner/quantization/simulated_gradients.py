"""Linear layers whose gradients are rounded to a number format with few exponents, computed in fp32.

They simulate the loss of a backward pass in fp16 or less on any machine: gradients that enter and leave the layer, and
gradients of its parameters, are rounded. Too small values become zero and too large ones infinite, as in hardware. The
forward pass is unchanged, since layer norms bound the range of activations.

Shapes: n inputs, m outputs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from limner.numerics.formats import FloatFormat


def simulate_cast(x: Float[Tensor, "..."], format: FloatFormat) -> Float[Tensor, "..."]:
    """Round x to a format, in fp32, with infinities beyond its largest number; NaN stays NaN."""
    _, exponent = math.frexp(format.max)
    limit = math.ldexp(1 - 2.0 ** -(format.mantissa + 2), exponent)  # halfway from the largest number to the next
    return torch.where(x.abs() < limit, format.round(x), x * math.inf)


class _LinearWithSimulatedGradients(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, format: FloatFormat) -> Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, ctx.format = inputs
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        grad = simulate_cast(grad, ctx.format)
        rows, inputs = grad.reshape(-1, len(weight)), x.reshape(-1, weight.shape[1])
        by_x = simulate_cast(grad @ weight, ctx.format) if ctx.needs_input_grad[0] else None
        by_weight = simulate_cast(rows.T @ inputs, ctx.format) if ctx.needs_input_grad[1] else None
        by_bias = simulate_cast(rows.sum(0), ctx.format) if ctx.biased and ctx.needs_input_grad[2] else None
        return by_x, by_weight, by_bias, None


class SimulatedGradientLinear(nn.Module):
    """`nn.Linear` with the parameters of `linear` and gradients rounded to `format`: x [..., n] -> [..., m]."""

    def __init__(self, linear: nn.Linear, format: FloatFormat) -> None:
        super().__init__()
        self.weight, self.bias, self.format = linear.weight, linear.bias, format

    def forward(self, x: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows m"]:
        return _LinearWithSimulatedGradients.apply(x, self.weight, self.bias, self.format)  # type: ignore[no-any-return]
