"""Linear layers whose gradients are rounded to a number format with few exponents, computed in fp32.

What a backward pass in fp16, or in less, would lose can be seen so on any machine: gradients that enter and leave the
layer, and those of its parameters, are rounded to the format. What is too small becomes zero, what is too large becomes
infinite, as in hardware. The forward pass stays as it is: activations have a range that layer norms keep.

Shapes: B rows, n inputs, m outputs.
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
    """The nearest numbers of a format, in fp32, with infinities beyond its largest; NaN stays."""
    _, exponent = math.frexp(form.maximum)
    limit = math.ldexp(1 - 2.0 ** -(form.mantissa + 2), exponent)  # halfway from the largest to what would come next
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
    """`nn.Linear` with the parameters of `linear`: x [..., n] -> [..., m]."""

    def __init__(self, linear: nn.Linear, form: FloatFormat) -> None:
        super().__init__()
        self.weight, self.bias, self.form = linear.weight, linear.bias, form

    def forward(self, x: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows m"]:
        return _Narrow.apply(x, self.weight, self.bias, self.form)  # type: ignore[no-any-return]
