"""A linear layer that stores its weight and the gradient of the weight in 16 bits.

Ramesh et al. 2021 store "most parameters" of the prior in 16 bits (§2.4): all but "gains, biases, embeddings, and
unembeddings" (App. D.2), so the matrices of resblocks. Without a copy in fp32, an update is rounded into the weight
(`optim/adam_base.py`).

Shapes: n inputs, m outputs.
"""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

__all__ = ["HalfLinear"]


class HalfLinear(nn.Linear):
    """`nn.Linear` with a weight in fp16 or bfloat16 and a bias in fp32: x [..., n] -> [..., m]. Product and result are
    in the weight's format, also under autocast."""

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
