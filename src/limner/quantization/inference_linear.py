"""Linear layers for inference: weights packed once for a CPU's matrix units or stored in 8 bits, or one row of input.

Shapes: n inputs, m outputs.
"""

from typing import TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from limner import compat
from limner.numerics.precision import acc_type
from limner.quantization.convert import convert, unhooked
from limner.quantization.quantize import quantize

M = TypeVar("M", bound=nn.Module)

_MAX_ROWS = 4  # rows up to which 8-bit weights are multiplied without conversion
_STEP = 16  # inputs that the 8-bit kernel reads together in bf16; for others, it reads beyond the end of a row
_PACKED_ROWS = 64  # oneDNN packs weights for this many rows; other numbers of rows are nearly as fast


class PackedLinear(nn.Module):
    """`nn.Linear` in bf16 on a CPU, for inference, with weights in oneDNN's packed layout.

    `nn.Linear` reorders its weights in every call, which for the few rows of a decoding step takes as long as the
    product. A packed layer takes half to two thirds of the time, and gives the same bits.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        with torch.inference_mode():
            self.weight = compat.reorder_linear_weight(linear.weight.detach(), _PACKED_ROWS)
            self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows m"]:
        return compat.linear_pointwise(x, self.weight, self.bias, "none", [], "")


class DotLinear(nn.Module):
    """`nn.Linear` for inference with one row, written as sums of products: x [1, ..., n] -> [1, ..., m].

    Use it compiled: Inductor emits one loop over the weights in storage order, limited by memory bandwidth, and fuses
    the operations that follow. Without compilation, the layer stores all m * n products.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows m"]:
        y = (x.unsqueeze(-2) * self.weight).sum(-1, dtype=acc_type(x.dtype))
        return (y if self.bias is None else y + self.bias).to(x.dtype)


class Int8Linear(nn.Module):
    """`nn.Linear` for inference with weights in 8 bits and a scale for each output, half of bf16's memory.

    On a CPU, one row of input takes 70 to 90% of a packed layer's time. More than a few rows take up to four times as
    long, since the weights are converted to the format of x first.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scale = quantize(linear.weight.detach(), by_row=True)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale.to(linear.weight.dtype))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows m"]:
        rows = x.reshape(-1, x.shape[-1])
        has_kernel = x.device.type == "cpu" and x.dtype != torch.float64 and rows.shape[1] % _STEP == 0
        if has_kernel and len(rows) <= _MAX_ROWS:
            y = compat.weight_int8pack_mm(rows.contiguous(), self.weight, self.scale)
        else:
            y = F.linear(rows, self.weight.to(x.dtype)) * self.scale
        y = y.view(*x.shape[:-1], len(self.weight))
        return y if self.bias is None else y + self.bias


def supports_packed_linear() -> bool:
    """Return True if `PackedLinear` works on this machine."""
    return torch.backends.mkldnn.is_available() and compat.is_mkldnn_bf16_supported()


def pack_linears(model: M) -> M:
    """Replace the linear layers of a bf16 model on a CPU by `PackedLinear`, in place, if `PackedLinear` works
    here (with oneDNN and, for example, AVX-512). Other models, and layers with hooks, are unchanged."""
    kinds = {(p.dtype, p.device.type) for p in model.parameters()}
    convertible = any(isinstance(layer, nn.Linear) and unhooked(name, layer) for name, layer in model.named_modules())
    if kinds != {(torch.bfloat16, "cpu")} or not supports_packed_linear() or not convertible:
        return model
    return convert(model, PackedLinear, unhooked)
