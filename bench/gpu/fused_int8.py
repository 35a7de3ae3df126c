"""A SwitchBack block whose int8 quantization is in the Triton kernels of layer norm and GELU, for `eight_bits.py`.

    norm_row_wise             layer norm, and the int8 rows of its result
    gelu_row_wise             GELU, and the int8 rows of its result
    gelu_backward_row_wise    the gradient of GELU's input, and its int8 rows

Each kernel reads a row once and keeps it in registers, so it also writes the 16-bit result, which the weight gradient
needs, without a further pass: quantization costs a write of one byte for each value. Integers and scales are those of
`quantize` of the 16-bit result. With `fuse`, a block runs without a compiler.

The kernels are here and not in `limner.quantization`, because a layer should use them only where a GPU shows a gain.

Shapes: b rows, n columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from limner.models.transformer import Block, Resblock
from limner.quantization.products import product, weight_gradient
from limner.quantization.quantize import quantize
from limner.quantization.triton_int8 import _INT8_MAX, _MIN_ABSMAX, _magnitude, _round

DTYPE = torch.bfloat16  # of results between products
_VALUES_PER_WARP = 1_024


@triton.jit
def _store_row(y, out, values, scale, n, columns):
    """Write a row of results, its integers and its scale."""
    row, mask = tl.program_id(0).to(tl.int64), columns < n
    y = y.to(out.dtype.element_ty)
    tl.store(out + row * n + columns, y, mask=mask)
    y = y.to(tl.float32)
    absmax = tl.maximum(tl.max(_magnitude(y), 0), _MIN_ABSMAX)
    tl.store(scale + row, tl.div_rn(absmax, _INT8_MAX * 1.0))
    inverse = tl.div_rn(_INT8_MAX * 1.0, absmax)
    tl.store(values + row * n + columns, _round(y * inverse).to(tl.int8), mask=mask)


@triton.jit
def norm_kernel(x, gain, bias, out, values, scale, mean, rstd, n, eps, BLOCK: tl.constexpr):
    """One program for each row."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = columns < n
    x = tl.load(x + row * n + columns, mask=mask, other=0.0).to(tl.float32)
    center = tl.sum(x, 0) / n
    x = tl.where(mask, x - center, 0.0)
    inverse = 1 / tl.sqrt_rn(tl.sum(x * x, 0) / n + eps)
    tl.store(mean + row, center)
    tl.store(rstd + row, inverse)
    gain = tl.load(gain + columns, mask=mask, other=0.0).to(tl.float32)
    y = x * inverse * gain + tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    _store_row(y, out, values, scale, n, columns)


@triton.jit
def gelu_kernel(u, g, out, values, scale, n, BACKWARD: tl.constexpr, BLOCK: tl.constexpr):
    """One program for each row: GELU of u or, with `BACKWARD`, the gradient of u for the gradient g of GELU."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = columns < n
    u = tl.load(u + row * n + columns, mask=mask, other=0.0).to(tl.float32)
    below = 0.5 * (1 + tl.erf(u * 0.7071067811865476))  # of the normal distribution
    if BACKWARD:
        density = tl.exp(-0.5 * u * u) * 0.3989422804014327
        y = tl.load(g + row * n + columns, mask=mask, other=0.0).to(tl.float32) * (below + u * density)
    else:
        y = u * below
    _store_row(y, out, values, scale, n, columns)


def norm_row_wise(x: Tensor, gain: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return int8 [b, n], scales [b], and the 16-bit layer norm [b, n] of x, with mean and 1 / deviation [b, 1]."""
    mean, rstd = (torch.empty(len(x), 1, device=x.device) for _ in range(2))
    out, values, scale = _outputs(x)
    _launch(norm_kernel, x.contiguous(), gain, bias, out, values, scale, mean, rstd, x.shape[1], eps)
    return values, scale, out, mean, rstd


def gelu_row_wise(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return int8 [b, n], scales [b], and the 16-bit GELU [b, n] of u."""
    out, values, scale = _outputs(u)
    _launch(gelu_kernel, u.contiguous(), u, out, values, scale, u.shape[1], BACKWARD=False)
    return values, scale, out


def gelu_backward_row_wise(g: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return int8 [b, n], scales [b], and the 16-bit gradient [b, n] of GELU's input u, for the gradient g of GELU."""
    out, values, scale = _outputs(u)
    _launch(gelu_kernel, u.contiguous(), g.contiguous(), out, values, scale, u.shape[1], BACKWARD=True)
    return values, scale, out


def _outputs(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    out = torch.empty(x.shape, dtype=DTYPE, device=x.device)
    return out, torch.empty_like(out, dtype=torch.int8), torch.empty(len(x), device=x.device)


def _launch(kernel: Any, x: Tensor, *arguments: Any, **constants: bool) -> None:
    block = triton.next_power_of_2(x.shape[1])
    warps = min(16, max(4, block // _VALUES_PER_WARP))
    kernel[(len(x),)](x, *arguments, **constants, BLOCK=block, num_warps=warps, enable_fp_fusion=False)


class _NormLinear(torch.autograd.Function):
    """Layer norm and a SwitchBack layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, shift: Tensor, eps: float, weight: Tensor, bias: Tensor) -> Tensor:
        q, scale, y, mean, rstd = norm_row_wise(x, gain, shift, eps)
        ctx.save_for_backward(x, gain, shift, mean, rstd, weight, y)
        return _multiply(q, scale, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _norm_linear_gradients(ctx.saved_tensors, g, *quantize(g, by_row=True))


class _NormMLP(torch.autograd.Function):
    """Layer norm and an MLP with GELU of two SwitchBack layers."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, shift: Tensor, eps: float,
        up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor,
    ) -> Tensor:  # fmt: skip
        q, scale, y, mean, rstd = norm_row_wise(x, gain, shift, eps)
        u = _multiply(q, scale, up, up_bias)
        q, scale, h = gelu_row_wise(u)
        ctx.save_for_backward(x, gain, shift, mean, rstd, up, y, u, h, down)
        return _multiply(q, scale, down, down_bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        *of_norm, u, h, down = ctx.saved_tensors
        by_h = _input_gradient(*quantize(g, by_row=True), down)
        q, scale, by_u = gelu_backward_row_wise(by_h, u)
        return *_norm_linear_gradients(of_norm, by_u, q, scale), *_parameter_gradients(g, h)


def _multiply(q: Tensor, scale: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    w, scale_w = quantize(weight, by_row=False)
    return product(q, w, scale, scale_w, bias, DTYPE)


def _input_gradient(q: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    w, scale_w = quantize(weight, by_row=False, transpose=True)
    return product(q, w, scale, scale_w, None, DTYPE)


def _parameter_gradients(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight and bias."""
    return weight_gradient(g, x, torch.zeros((), dtype=torch.int64)), g.sum(0, dtype=torch.float32)


def _norm_linear_gradients(saved: Any, g: Tensor, q: Tensor, scale: Tensor) -> tuple[Any, ...]:
    """Return the gradients of the arguments of `_NormLinear` for the gradient g of its result and the rows of g."""
    x, gain, shift, mean, rstd, weight, y = saved
    by_y = _input_gradient(q, scale, weight).to(x.dtype)
    by_norm = torch.ops.aten.native_layer_norm_backward(by_y, x, gain.shape, mean, rstd, gain, shift, [True] * 3)
    return *by_norm, None, *_parameter_gradients(g, y)


class _FusedResblock(nn.Module):
    """A resblock with the children and parameters of another one."""

    def __init__(self, resblock: Resblock) -> None:
        super().__init__()
        self.norm, self.branch = resblock.norm, resblock.branch

    def norm_arguments(self, x: Tensor) -> tuple[Any, ...]:
        """Return the arguments of both functions that are those of the layer norm."""
        return x.reshape(-1, x.shape[-1]), self.norm.weight, self.norm.bias, self.norm.eps


class FusedAttention(_FusedResblock):
    """Attention whose layer norm quantizes for its first matrix; its second is the branch's own layer."""

    def forward(self, x: Tensor, attention_fn: Any) -> Tensor:
        attention: Any = self.branch
        b, n, d = x.shape
        qkv = _NormLinear.apply(*self.norm_arguments(x), attention.qkv.weight, attention.qkv.bias)
        q, k, v = (y.view(b, n, attention.heads, -1).transpose(1, 2) for y in qkv.view(b, n, 3 * d).chunk(3, -1))
        return x + attention.out(attention_fn(q, k, v).transpose(1, 2).reshape(b, n, d))


class FusedMLP(_FusedResblock):
    """An MLP whose layer norm and GELU quantize for its matrices."""

    def forward(self, x: Tensor) -> Tensor:
        mlp: Any = self.branch
        parameters = (mlp.up.weight, mlp.up.bias, mlp.down.weight, mlp.down.bias)
        return x + _NormMLP.apply(*self.norm_arguments(x), *parameters).view(x.shape)


def fuse(block: Block) -> Block:
    """Replace the resblocks of a block of SwitchBack layers by fused ones, in place, and return the block."""
    replacements: Any = FusedAttention(block.attention), FusedMLP(block.mlp)
    block.attention, block.mlp = replacements
    return block
