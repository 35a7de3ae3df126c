"""The one place where a linear layer's precision and form are chosen.

Models never name `nn.Linear` in their blocks: they are given a factory. The default is a plain layer in the
precision of its surroundings (autocast decides). For drawing on a CPU, `packed` lays the weights out once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

LinearFactory = Callable[[int, int], nn.Module]
M = TypeVar("M", bound=nn.Module)

_ROWS = 64  # for which oneDNN is asked to lay the weights out; others are served nearly as fast


def plain(n_in: int, n_out: int) -> nn.Module:
    """An ordinary `nn.Linear` with a bias."""
    return nn.Linear(n_in, n_out)


class PackedLinear(nn.Module):
    """`nn.Linear` in bf16 on a CPU, for inference: its weights lie as oneDNN multiplies them.

    An ordinary layer lays them out again in every call, which for the few rows of a decoding step takes as
    long as the product: this one takes half to two thirds of the time, and gives the same bits.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        with torch.inference_mode():
            self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS)
            self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def packed(model: M) -> M:
    """Replace the linear layers of a bf16 model on a CPU, in place, where torch was built with oneDNN."""
    if torch.backends.mkldnn.is_available():
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:
                    setattr(parent, name, PackedLinear(child))
    return model
