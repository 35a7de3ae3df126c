"""A linear layer whose three products are one autograd function's, and what such functions have in common.

Training a linear layer takes three products (Wortsman et al. 2023, §2.2.1):

    forward           Y  = X W^T     [b, m], sums over n
    input gradient    X' = Y' W      [b, n], sums over m
    weight gradient   W' = Y'^T X    [m, n], sums over b, which is batch size times positions

`switchback.py` and `float8.py` say in which of them the numbers have eight bits. Parameters keep the names and the
format that they have in `nn.Linear`: checkpoints and optimisers see no difference, and `plain` makes the layers
ordinary ones again.

Each function takes (x, weight, bias, tally) and works under autocast, checkpointing, `torch.compile` and `torch.func`.
It has no second derivative, and says so if one is asked for.

Shapes: b rows, n inputs, m outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar, Self, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from limner.layers.half_linear import HalfLinear
from limner.layers.kernel_counter import Tally, count_product
from limner.layers.vmap_loop import looped
from limner.numerics import precision

M = TypeVar("M", bound=nn.Module)
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, None]  # of x, weight, bias and tally


class LowPrecisionLinear(nn.Linear):
    """`nn.Linear` with the products of `function`.

    The result is in autocast's format, or else in that of the input, as with `nn.Linear`.

    Attributes:
        tally: which kernels have computed its products (`kernel_counter.py`).

    Raises:
        RuntimeError: an input is not of floating-point numbers, or its last dimension not `in_features`.
    """

    function: ClassVar[type[torch.autograd.Function]]

    def __init__(self, in_features: int, out_features: int, bias: bool = True, device: Any = None) -> None:
        super().__init__(in_features, out_features, bias, device)
        self.tally = Tally()

    @classmethod
    def of(cls, linear: nn.Linear) -> Self:
        """A layer that shares the parameters of another."""
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer

    def forward(self, input: Float[Tensor, "... n"]) -> Float[Tensor, "... m"]:
        if not input.is_floating_point() or input.shape[-1:] != (self.in_features,):
            raise RuntimeError(
                f"a {type(self).__name__} needs floating-point numbers with {self.in_features} features in the last "
                f"dimension, not {str(input.dtype).removeprefix('torch.')} {list(input.shape)}"
            )
        kind, x = input.device.type, input
        if kind != "meta" and torch.is_autocast_enabled(kind) and x.dtype != torch.float64:  # which autocast leaves
            x = input.to(torch.get_autocast_dtype(kind))
        if not x.numel() or not self.out_features or kind == "meta":  # nothing is multiplied
            return F.linear(x, self.weight.to(x.dtype), self.bias if self.bias is None else self.bias.to(x.dtype))
        x = x.reshape(-1, self.in_features)
        y = self.function.apply(x, self.weight, self.bias, self.tally.number)
        y = y[0] if isinstance(y, tuple) else y  # what comes after it is saved for the backward pass
        return y.view(*input.shape[:-1], self.out_features)


def plain(model: M) -> M:
    """Put an `nn.Linear` with the same parameters in the place of each layer of low precision, in place; a weight in
    16 bits becomes fp32."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, HalfLinear):
            layer.weight = nn.Parameter(layer.weight.detach().float(), layer.weight.requires_grad)
        if isinstance(layer, LowPrecisionLinear | HalfLinear):
            linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
            linear.weight, linear.bias = layer.weight, layer.bias
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, linear.train(layer.training))
    return model


class Saves(torch.autograd.Function):
    """A function that saves x and weight for its backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, Tensor], output: Any) -> None:
        x, weight, _, tally = inputs
        ctx.save_for_backward(x, weight, tally)


class _Refusal(torch.autograd.Function):
    """A gradient as it is, which cannot be differentiated by what it was computed from."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None: ...

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        raise RuntimeError(
            "a layer in 8 bits cannot be differentiated twice: rounding has no derivative; take second derivatives of "
            "the model after `limner.layers.low_precision.plain(model)`"
        )


def once(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """A backward pass that says so if it is differentiated itself: torch's `once_differentiable` gives zeros within
    `torch.func`."""

    @wraps(backward)
    def refusing(ctx: Any, *grads: Tensor) -> Gradients:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        sources = (*grads[:1], *ctx.saved_tensors)
        return tuple(x if x is None else _Refusal.apply(x, *sources) for x in found)  # type: ignore[return-value]

    return refusing


def weight_gradient(g: Float[Tensor, "b m"], x: Float[Tensor, "b n"], dtype: torch.dtype, tally: Tensor) -> Tensor:
    """g^T x in 16 bits, given in `dtype` [m, n]: the product that SwitchBack leaves in higher precision.

    On a GPU it is computed in the format of x if that is a 16-bit one; else in bf16 where the hardware multiplies it
    faster than fp32 (`numerics/precision.py`), and in fp32 where not. Sums are in fp32, and are then rounded to that
    format, as those of `nn.Linear` are under autocast.
    """
    return _weight_gradient(g, x, tally).to(dtype)


@looped
@torch.library.custom_op("limner::weight_gradient", mutates_args=())
def _weight_gradient(g: Tensor, x: Tensor, tally: Tensor) -> Tensor:
    if x.is_cuda and x.dtype in (torch.float16, torch.bfloat16):
        dtype = x.dtype
    else:  # a CPU has no fast product in fp16, and bf16 would round what fp16 holds
        dtype = torch.float32 if x.dtype == torch.float16 else precision.Auto().dtype(x.device)
    count_product(tally, "weight gradient", str(dtype).removeprefix("torch."))
    with torch.autocast(x.device.type, enabled=False):
        return (g.to(dtype).mT @ x.to(dtype)).float()


@_weight_gradient.register_fake
def _(g: Tensor, x: Tensor, tally: Tensor) -> Tensor:
    return g.new_empty(g.shape[1], x.shape[1], dtype=torch.float32)


def bias_gradient(g: Float[Tensor, "b m"], dtype: torch.dtype) -> Float[Tensor, " m"]:
    """The sum of the rows in `acc_type`, given in `dtype`."""
    return g.sum(0, dtype=precision.acc_type(g.dtype)).to(dtype)
