"""Linear layers whose gradients are rounded to a number format with few exponents, computed in fp32.

They simulate the loss of a backward pass in fp16 or less on any machine: gradients that enter and leave the layer, and
gradients of its parameters, are rounded. Too small values become zero and too large ones infinite, as in hardware. The
forward pass is unchanged, since layer norms bound the range of activations.

Shapes: n inputs, m outputs.
"""

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


class _RoundedGradient(torch.autograd.Function):
    """Identity whose backward pass rounds the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, format: FloatFormat) -> Tensor:
        ctx.format = format
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return simulate_cast(upstream[0], ctx.format), None


class SimulatedGradientLinear(nn.Module):
    """`nn.Linear` with the parameters of `linear` and gradients rounded to `format`: x [..., n] -> [..., m]."""

    def __init__(self, linear: nn.Linear, format: FloatFormat) -> None:
        super().__init__()
        self.weight, self.bias, self.format = linear.weight, linear.bias, format

    def forward(self, x: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows m"]:
        inputs = (y if y is None else _RoundedGradient.apply(y, self.format) for y in (x, self.weight, self.bias))
        return _RoundedGradient.apply(F.linear(*inputs), self.format)  # type: ignore[no-any-return]
