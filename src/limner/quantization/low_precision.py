"""A linear layer whose three products are one autograd function, and the shared parts of such functions.

Training a linear layer takes three products (Wortsman et al. 2023, §2.2.1):

    forward           Y  = X W^T     [b, m], sums over n
    input gradient    X' = Y' W      [b, n], sums over m
    weight gradient   W' = Y'^T X    [m, n], sums over b, which is batch size times positions

`switchback.py` and `float8.py` define which products use eight bits. Parameters keep the names and the format of
`nn.Linear`, so checkpoints and optimizers work unchanged, and `to_linear` restores `nn.Linear` layers.

Each function takes (x, weight, bias, counter) and works under autocast, checkpointing, `torch.compile` and
`torch.func`. A second derivative raises `RuntimeError`.

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

from limner.numerics import precision
from limner.quantization.half_linear import HalfLinear
from limner.quantization.kernel_counter import KernelCounter, count_product
from limner.quantization.vmap_loop import vmap_by_loop

M = TypeVar("M", bound=nn.Module)
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, None]  # of x, weight, bias and counter


class LowPrecisionLinear(nn.Linear):
    """`nn.Linear` with the products of `function`: x [..., n] -> [..., m].

    The result is in autocast's format, or else in the input's, as with `nn.Linear`.

    Attributes:
        counter: counts of the kernels that computed its products (`kernel_counter.py`).

    Raises:
        RuntimeError: an input is not floating-point, or its last dimension is not `in_features`.
    """

    function: ClassVar[type[torch.autograd.Function]]

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
        x = x.reshape(-1, self.in_features)
        y = self.function.apply(x, self.weight, self.bias, self.counter.id)
        y = y[0] if isinstance(y, tuple) else y  # further outputs are saved for the backward pass
        return y.view(*input.shape[:-1], self.out_features)


def to_linear(model: M) -> M:
    """Replace each low-precision layer by an `nn.Linear` with the same parameters, in place. 16-bit weights become
    fp32."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, HalfLinear):
            layer.weight = nn.Parameter(layer.weight.detach().float(), layer.weight.requires_grad)
        if isinstance(layer, LowPrecisionLinear | HalfLinear):
            linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
            linear.weight, linear.bias = layer.weight, layer.bias
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, linear.train(layer.training))
    return model


class SaveInputs(torch.autograd.Function):
    """An autograd function that saves x, weight and counter for its backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, Tensor], output: Any) -> None:
        x, weight, _, counter = inputs
        ctx.save_for_backward(x, weight, counter)


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


def once_differentiable(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Make a backward pass raise `RuntimeError` if differentiated: torch's `once_differentiable` gives zeros within
    `torch.func`."""

    @wraps(backward)
    def wrapped(ctx: Any, *grads: Tensor) -> Gradients:
        with torch.no_grad():
            gradients = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return gradients
        sources = (*grads[:1], *ctx.saved_tensors)
        return tuple(x if x is None else _NoDoubleBackward.apply(x, *sources) for x in gradients)  # type: ignore[return-value]

    return wrapped


def weight_gradient(g: Float[Tensor, "b m"], x: Float[Tensor, "b n"], dtype: torch.dtype, counter: Tensor) -> Tensor:
    """Return g^T x [m, n] in `dtype`, computed in 16 bits: the product that SwitchBack keeps in higher precision.

    On a GPU the format is that of x if it has 16 bits. Otherwise it is bf16 where the hardware multiplies bf16 faster
    than fp32 (`numerics/precision.py`) and x is not fp16, else fp32. Sums are fp32, then rounded to that format, as for
    `nn.Linear` under autocast.
    """
    return _weight_gradient(g, x, counter).to(dtype)


@vmap_by_loop
@torch.library.custom_op("limner::weight_gradient", mutates_args=())
def _weight_gradient(g: Tensor, x: Tensor, counter: Tensor) -> Tensor:
    if x.is_cuda and x.dtype in (torch.float16, torch.bfloat16):
        dtype = x.dtype
    else:  # CPUs lack a fast fp16 product, and bf16 would round fp16 values
        dtype = torch.float32 if x.dtype == torch.float16 else precision.Auto().dtype(x.device)
    count_product(counter, "weight gradient", str(dtype).removeprefix("torch."))
    with torch.autocast(x.device.type, enabled=False):
        return (g.to(dtype).mT @ x.to(dtype)).float()


@_weight_gradient.register_fake
def _(g: Tensor, x: Tensor, counter: Tensor) -> Tensor:
    return g.new_empty(g.shape[1], x.shape[1], dtype=torch.float32)


def bias_gradient(g: Float[Tensor, "b m"], dtype: torch.dtype) -> Float[Tensor, " m"]:
    """Return the sum of the rows, accumulated in `acc_type`, in `dtype`."""
    return g.sum(0, dtype=precision.acc_type(g.dtype)).to(dtype)
