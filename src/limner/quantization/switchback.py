"""Linear layers that train with 8-bit integers (Wortsman et al. 2023, §2.2 and Appendix C.1).

                       input, gradient    weight             weight gradient    saved for it
    SwitchBack         by row             one scale          16 bits            input
    SwitchBackM        by row             one scale          16 bits            input in 8 bits
    SwitchBackQ        by row             by row, column     16 bits            input
    LLM.int8()         by row             by row, column     8 bits, by column  input
    Standard           no 8 bits          -                  16 bits            input

The error of a product of rounded numbers grows with the number of terms summed (Appendix D, equation 12). The weight
gradient sums over all positions of a batch, the other two products only over a layer's width. So SwitchBack switches
back to 16 bits for the weight gradient, unlike LLM.int8().

Two of the three products are in 8 bits. If int8 products are r times as fast, a layer takes (2 / r + 1) / 3 of its
time, plus rounding: a speedup of at most three if the weight gradient keeps its speed, and more where 16 bits are
faster than 32 (AMX, tensor cores).

Shapes: b rows, n inputs, m outputs. `weight` is [m, n].
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from limner.quantization import int8
from limner.quantization.low_precision import (
    Gradients,
    LowPrecisionLinear,
    SaveInputs,
    bias_gradient,
    once_differentiable,
    weight_gradient,
)
from limner.quantization.quantize import column_wise, dequantize, row_wise, tensor_wise, tensor_wise_transposed


class _SwitchBack(SaveInputs):
    """Algorithm 1."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, counter: Tensor) -> Tensor:
        (q, state_x), (w, state_w) = row_wise(x), tensor_wise(weight)
        return int8.product(q, w, state_x, state_w, bias, x.dtype, counter=counter)  # equation 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Gradients:
        x, weight, counter = ctx.saved_tensors
        by_x = by_weight = by_bias = None
        if ctx.needs_input_grad[0]:
            (q, state_g), (w, state_w) = row_wise(g), tensor_wise_transposed(weight)
            by_x = int8.product(q, w, state_g, state_w, None, g.dtype, counter=counter, role="input gradient")
        if ctx.needs_input_grad[1]:
            by_weight = weight_gradient(g, x, weight.dtype, counter)
        if ctx.needs_input_grad[2]:
            by_bias = bias_gradient(g, weight.dtype)
        return by_x, by_weight, by_bias, None


class _SwitchBackM(Function):
    """Algorithm 3: x and the weight are saved in 8 bits."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, counter: Tensor) -> tuple[Tensor, ...]:
        (q, state_x), (w, state_w) = row_wise(x), tensor_wise(weight)
        return int8.product(q, w, state_x, state_w, bias, x.dtype, counter=counter), q, state_x, w, state_w

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, Tensor], output: tuple[Tensor, ...]
    ) -> None:
        _, weight, _, counter = inputs
        ctx.format = weight.dtype
        ctx.mark_non_differentiable(output[1], output[3])  # integers; the scales connect to x and the weight
        ctx.save_for_backward(*output[1:], counter)
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, *_: Any) -> Gradients:
        q, state_x, w, state_w, counter = ctx.saved_tensors
        by_x = by_weight = by_bias = None
        if ctx.needs_input_grad[0]:
            values, state_g = row_wise(g)
            by_x = int8.product(values, w.mT, state_g, state_w, None, g.dtype, counter=counter, role="input gradient")
        if ctx.needs_input_grad[1]:
            by_weight = weight_gradient(g, dequantize(q, state_x).to(g.dtype), ctx.format, counter)
        if ctx.needs_input_grad[2]:
            by_bias = bias_gradient(g, ctx.format)
        return by_x, by_weight, by_bias, None


class _SwitchBackQ(SaveInputs):
    """Algorithm 4: the weight has a scale for each output (forward) or input (backward)."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, counter: Tensor) -> Tensor:
        (q, state_x), (w, state_w) = row_wise(x), row_wise(weight)
        return int8.product(q, w, state_x, state_w, bias, x.dtype, counter=counter)  # equation 4

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Gradients:
        x, weight, counter = ctx.saved_tensors
        by_x = by_weight = by_bias = None
        if ctx.needs_input_grad[0]:
            by_x = _by_columns(g, weight, counter)
        if ctx.needs_input_grad[1]:
            by_weight = weight_gradient(g, x, weight.dtype, counter)
        if ctx.needs_input_grad[2]:
            by_bias = bias_gradient(g, weight.dtype)
        return by_x, by_weight, by_bias, None


class _LLMInt8(SaveInputs):
    """LLM.int8() as in the paper's comparison (§2.2.3): `_SwitchBackQ` with the weight gradient in 8 bits as well.

    Columns of g and x have separate scales, since the weight gradient sums over rows. Dettmers et al. (2022) also keep
    columns with outliers in 16 bits; the paper's baseline does not.
    """

    forward = _SwitchBackQ.forward

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Gradients:
        x, weight, counter = ctx.saved_tensors
        by_x = by_weight = by_bias = None
        if ctx.needs_input_grad[0]:
            by_x = _by_columns(g, weight, counter)
        if ctx.needs_input_grad[1]:
            (values, state_g), (q, state_x) = column_wise(g), column_wise(x)
            by_weight = int8.product(
                values.mT, q.mT, state_g, state_x, None, weight.dtype, counter=counter, role="weight gradient"
            )
        if ctx.needs_input_grad[2]:
            by_bias = bias_gradient(g, weight.dtype)
        return by_x, by_weight, by_bias, None


def _by_columns(g: Tensor, weight: Tensor, counter: Tensor) -> Tensor:
    """Return the input gradient g W in 8 bits, with a scale for each row of g and each column of the weight."""
    (q, state_g), (w, state_w) = row_wise(g), column_wise(weight)
    return int8.product(q, w.mT, state_g, state_w, None, g.dtype, counter=counter, role="input gradient")


class _Standard(SaveInputs):
    """Algorithm 5: a linear layer as an autograd function without 8 bits, for speed comparisons."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, counter: Tensor) -> Tensor:
        y = x @ weight.to(x.dtype).mT
        return y if bias is None else y + bias.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Gradients:
        x, weight, _ = ctx.saved_tensors
        by_x = by_weight = by_bias = None
        if ctx.needs_input_grad[0]:
            by_x = g @ weight.to(g.dtype)
        if ctx.needs_input_grad[1]:
            by_weight = (g.mT @ x).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            by_bias = g.sum(0).to(weight.dtype)
        return by_x, by_weight, by_bias, None


class SwitchBackLinear(LowPrecisionLinear):
    """`nn.Linear` in int8, with the weight gradient in 16 bits (Algorithm 1)."""

    function = _SwitchBack


class SwitchBackMLinear(LowPrecisionLinear):
    """`SwitchBackLinear` that saves int8 for the backward pass, a quarter of fp32's memory (Algorithm 3)."""

    function = _SwitchBackM


class SwitchBackQLinear(LowPrecisionLinear):
    """`SwitchBackLinear` with a scale for each row or column of the weight (Algorithm 4)."""

    function = _SwitchBackQ


class LLMInt8Linear(LowPrecisionLinear):
    """`nn.Linear` with all three products in int8: the baseline that loses accuracy for large batches (§2.2.3)."""

    function = _LLMInt8


class StandardLinear(LowPrecisionLinear):
    """`nn.Linear` as a Python autograd function, for speed comparisons (Algorithm 5). It counts no products."""

    function = _Standard
