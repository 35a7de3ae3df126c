"""Linear layers whose gradients are rounded to a number format with few exponents, computed in fp32.

They simulate the loss of a backward pass in fp16 or less on any machine: gradients that enter and leave the layer, and
gradients of its parameters, are rounded to the format. Too small values become zero and too large ones infinite, as in
hardware. The forward pass is unchanged, since layer norms bound the range of activations.

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


def narrowed(x: Float[Tensor, "..."], form: FloatFormat) -> Float[Tensor, "..."]:
    """Round x to a format, in fp32, with infinities beyond its largest number; NaN stays NaN."""
    _, exponent = math.frexp(form.maximum)
    limit = math.ldexp(1 - 2.0 ** -(form.mantissa + 2), exponent)  # halfway from the largest number to the next
    return torch.where(x.abs() < limit, form.rounded(x), x * math.inf)


class _Narrow(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, form: FloatFormat) -> Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, ctx.form = inputs
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        grad = narrowed(grad, ctx.form)
        rows = grad.reshape(-1, len(weight))
        by_x = narrowed(grad @ weight, ctx.form) if ctx.needs_input_grad[0] else None
        by_weight = narrowed(rows.T @ x.reshape(-1, weight.shape[1]), ctx.form) if ctx.needs_input_grad[1] else None
        by_bias = narrowed(rows.sum(0), ctx.form) if ctx.biased and ctx.needs_input_grad[2] else None
        return by_x, by_weight, by_bias, None


class NarrowLinear(nn.Module):
    """`nn.Linear` with the parameters of `linear` and gradients rounded to `form`: x [..., n] -> [..., m]."""

    def __init__(self, linear: nn.Linear, form: FloatFormat) -> None:
        super().__init__()
        self.weight, self.bias, self.form = linear.weight, linear.bias, form

    def forward(self, x: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows m"]:
        return _Narrow.apply(x, self.weight, self.bias, self.form)  # type: ignore[no-any-return]
