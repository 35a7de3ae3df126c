"""Linear layers that train in eight or sixteen bits.

Training a linear layer takes three products (Wortsman et al. 2023, §2.2.1):

    forward           Y  = X W^T     [b, m], sums over n
    input gradient    X' = Y' W      [b, n], sums over m
    weight gradient   W' = Y'^T X    [m, n], sums over b, which is batch size times positions

A `Scheme` says which of them use eight bits, and which entries share a scale:

                     format        input, gradient   weight           weight gradient    saved for it
    SwitchBack       int8          by row            one scale        16 bits            input
    SwitchBackM      int8          by row            one scale        16 bits            input in 8 bits
    SwitchBackQ      int8          by row            by row, column   16 bits            input
    LLM.int8()       int8          by row            by row, column   8 bits, by column  input
    Fp8SwitchBack    e4m3, e5m2    by row            one scale        16 bits            input
    Fp8TensorWise    e4m3, e5m2    one scale each    one scale        8 bits             input
    Standard         no 8 bits                                        format of input    input

The error of a product of rounded numbers grows with the number of terms summed (Appendix D, equation 12). The weight
gradient sums over all positions of a batch, the other two products only over a layer's width. So SwitchBack switches
back to 16 bits for the weight gradient, unlike LLM.int8().

Two of the three products are in 8 bits. If these are r times as fast, a layer takes (2 / r + 1) / 3 of its time, plus
rounding: a speedup of at most three if the weight gradient keeps its speed.

e4m3 has four bits of exponent and three of mantissa, e5m2 five and two: inputs and weights need precision, gradients
need range (Micikevicius et al. 2022, which the paper follows).

Parameters keep the names and the format of `nn.Linear`, so checkpoints and optimizers work unchanged, as do autocast,
checkpointing, `torch.compile` and `torch.func`. A second derivative of an 8-bit layer raises `RuntimeError`.

Shapes: b rows, n inputs, m outputs. `weight` is [m, n].
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from limner.numerics.precision import acc_type
from limner.quantization.products import KernelCounter, product, weight_gradient
from limner.quantization.quantize import E4M3, E5M2, dequantize, quantize

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Scheme:
    """The number formats and scales of an 8-bit layer's products: a row of the table above.

    Attributes:
        format: number format of inputs and weights.
        gradient_format: number format of gradients.
        by_row: inputs and gradients have a scale for each row (column in the weight gradient), else one scale.
        weight_by_row: weights have a scale for each row (column in the input gradient), else one scale.
        low_weight_gradient: the weight gradient is computed in 8 bits, else in 16.
        saves_8_bits: input and weight are saved for the backward pass in 8 bits.
    """

    format: torch.dtype = torch.int8
    gradient_format: torch.dtype = torch.int8
    by_row: bool = True
    weight_by_row: bool = False
    low_weight_gradient: bool = False
    saves_8_bits: bool = False


class _LowPrecisionFunction(torch.autograd.Function):
    """The three products of a scheme. The outputs after the first are saved for the backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, counter: Tensor, scheme: Scheme) -> tuple[Tensor, ...]:
        q, scale_x = quantize(x, scheme.by_row, scheme.format)
        w, scale_w = quantize(weight, scheme.weight_by_row, scheme.format)
        y = product(q, w, scale_x, scale_w, bias, x.dtype, counter)
        return (y, q, scale_x, w, scale_w) if scheme.saves_8_bits else (y,)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, _, counter, ctx.scheme = inputs
        ctx.dtype = weight.dtype
        if ctx.scheme.saves_8_bits:
            ctx.mark_non_differentiable(output[1], output[3])  # integers; the scales connect to x and the weight
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(counter, *output[1:])
        else:
            ctx.save_for_backward(counter, x, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        scheme = ctx.scheme
        counter, *saved = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        by_x = by_weight = by_bias = None
        with torch.no_grad():
            if needs_x or not scheme.by_row:
                h, scale_g = quantize(g, scheme.by_row, scheme.gradient_format)
            if needs_x:
                if scheme.saves_8_bits:
                    w, scale_w = saved[2].mT, saved[3]
                else:
                    w, scale_w = quantize(saved[1], scheme.weight_by_row, scheme.format, transpose=True)
                by_x = product(h, w, scale_g, scale_w, None, g.dtype, counter, "input gradient")
            if needs_weight and scheme.low_weight_gradient:
                q, scale_x = quantize(saved[0], scheme.by_row, scheme.format, transpose=True)
                if scheme.by_row:
                    h, scale_g = quantize(g, True, scheme.gradient_format, transpose=True)
                else:
                    h = h.mT
                by_weight = product(h, q, scale_g, scale_x, None, ctx.dtype, counter, "weight gradient")
            elif needs_weight:
                x = dequantize(*saved[:2]).to(g.dtype) if scheme.saves_8_bits else saved[0]
                by_weight = weight_gradient(g, x, counter).to(ctx.dtype)
            if needs_bias:
                by_bias = g.sum(0, dtype=acc_type(g.dtype)).to(ctx.dtype)
        gradients: list[Tensor | None] = [by_x, by_weight, by_bias]
        if torch.is_grad_enabled():  # torch's `once_differentiable` gives zeros within `torch.func`
            gradients = [y if y is None else _NoDoubleBackward.apply(y, g, *ctx.saved_tensors) for y in gradients]
        return *gradients, None, None


class _NoDoubleBackward(torch.autograd.Function):
    """Identity on a gradient. Its backward pass raises `RuntimeError`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None: ...

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        raise RuntimeError(
            "8-bit layers cannot be differentiated twice: convert the model to nn.Linear layers first, with "
            "`limner.quantization.low_precision.to_linear(model)`"
        )


class _StandardFunction(torch.autograd.Function):
    """Algorithm 5: a linear layer as an autograd function without 8 bits."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = x @ weight.to(x.dtype).mT
        return y if bias is None else y + bias.to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            g @ weight.to(g.dtype) if needs_x else None,
            (g.mT @ x).to(weight.dtype) if needs_weight else None,
            g.sum(0).to(weight.dtype) if needs_bias else None,
        )


class LowPrecisionLinear(nn.Linear):
    """`nn.Linear` with the products of `scheme`: x [..., n] -> [..., m].

    The result is in autocast's format, or else in the input's, as with `nn.Linear`.

    Attributes:
        counter: counts of the kernels that computed its products (`products.py`).

    Raises:
        RuntimeError: an input is not floating-point, or its last dimension is not `in_features`.
    """

    scheme: ClassVar[Scheme]

    def __init__(self, in_features: int, out_features: int, bias: bool = True, device: Any = None) -> None:
        super().__init__(in_features, out_features, bias, device)
        self.counter = KernelCounter()

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> Self:
        """Return a layer that shares the parameters of `linear`."""
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer

    def forward(self, input: Float[Tensor, "... n"]) -> Float[Tensor, "... m"]:
        if not input.is_floating_point() or input.shape[-1:] != (self.in_features,):
            raise RuntimeError(
                f"{type(self).__name__} needs floating-point input with {self.in_features} features in the last "
                f"dimension, not {str(input.dtype).removeprefix('torch.')} {list(input.shape)}"
            )
        kind, x = input.device.type, input
        if kind != "meta" and torch.is_autocast_enabled(kind) and x.dtype != torch.float64:  # autocast skips fp64
            x = input.to(torch.get_autocast_dtype(kind))
        if not x.numel() or not self.out_features or kind == "meta":  # no product
            return F.linear(x, self.weight.to(x.dtype), self.bias if self.bias is None else self.bias.to(x.dtype))
        return self._multiply(x.reshape(-1, self.in_features)).view(*input.shape[:-1], self.out_features)

    def _multiply(self, x: Float[Tensor, "b n"]) -> Float[Tensor, "b m"]:
        return _LowPrecisionFunction.apply(x, self.weight, self.bias, self.counter.id, self.scheme)[0]  # type: ignore[no-any-return]


class SwitchBackLinear(LowPrecisionLinear):
    """`nn.Linear` in int8, with the weight gradient in 16 bits (Algorithm 1)."""

    scheme = Scheme()


class SwitchBackMLinear(LowPrecisionLinear):
    """`SwitchBackLinear` that saves int8 for the backward pass, a quarter of fp32's memory (Algorithm 3)."""

    scheme = Scheme(saves_8_bits=True)


class SwitchBackQLinear(LowPrecisionLinear):
    """`SwitchBackLinear` with a scale for each row or column of the weight (Algorithm 4)."""

    scheme = Scheme(weight_by_row=True)


class LLMInt8Linear(LowPrecisionLinear):
    """`nn.Linear` with all three products in int8: the baseline that loses accuracy for large batches (§2.2.3).

    Dettmers et al. (2022) also keep columns with outliers in 16 bits; the paper's baseline does not.
    """

    scheme = Scheme(weight_by_row=True, low_weight_gradient=True)


class Fp8SwitchBackLinear(LowPrecisionLinear):
    """`nn.Linear` in float8, with the weight gradient in 16 bits (§2.2.1)."""

    scheme = Scheme(E4M3, E5M2)


class Fp8TensorWiseLinear(LowPrecisionLinear):
    """`nn.Linear` with all products in float8, one scale per matrix: the baseline that diverges in large models."""

    scheme = Scheme(E4M3, E5M2, by_row=False, low_weight_gradient=True)


class StandardLinear(LowPrecisionLinear):
    """`nn.Linear` as a Python autograd function, for speed comparisons (Algorithm 5). It counts no products."""

    def _multiply(self, x: Float[Tensor, "b n"]) -> Float[Tensor, "b m"]:
        return _StandardFunction.apply(x, self.weight, self.bias)  # type: ignore[no-any-return]


class HalfLinear(nn.Linear):
    """`nn.Linear` with a weight in fp16 or bfloat16 and a bias in fp32: x [..., n] -> [..., m]. Product and result are
    in the weight's format, also under autocast.

    Ramesh et al. 2021 store "most parameters" of the prior in 16 bits (§2.4): all but "gains, biases, embeddings, and
    unembeddings" (App. D.2), so the matrices of resblocks. Without a copy in fp32, an update is rounded into the weight
    (`optim/adam_base.py`).
    """

    @classmethod
    def from_linear(cls, linear: nn.Linear, dtype: torch.dtype) -> Self:
        """Return a layer with the bias of `linear` and its weight rounded to `dtype`."""
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        layer.weight = nn.Parameter(linear.weight.detach().to(dtype), linear.weight.requires_grad)
        layer.bias = linear.bias
        return layer

    def forward(self, input: Float[Tensor, "... n"]) -> Float[Tensor, "... m"]:
        dtype = self.weight.dtype
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.to(dtype), self.weight, None if self.bias is None else self.bias.to(dtype))


def to_linear(model: M) -> M:
    """Replace each low-precision layer by an `nn.Linear` with the same parameters, in place. 16-bit weights become
    fp32."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, LowPrecisionLinear | HalfLinear):
            linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
            linear.weight, linear.bias = layer.weight, layer.bias
            if isinstance(layer, HalfLinear):
                linear.weight = nn.Parameter(layer.weight.detach().float(), layer.weight.requires_grad)
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, linear.train(layer.training))
    return model
