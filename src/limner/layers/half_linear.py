"""A linear layer whose weight is stored in 16 bits, and with it the gradient of the weight.

Of the prior of Ramesh et al. 2021 "most parameters" are (§2.4): all but "gains, biases, embeddings, and unembeddings"
(App. D.2), so the matrices of resblocks. A weight has no copy in fp32 anywhere: what an update adds to it is rounded
into it (`optim/adam_base.py`).

Shapes: n inputs, m outputs.
"""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class HalfLinear(nn.Linear):
    """`nn.Linear` with a weight in fp16 or bfloat16 and a bias in fp32: x [..., n] -> [..., m] in the weight's format,
    in which the product is computed, whatever autocast says."""

    @classmethod
    def of(cls, linear: nn.Linear, dtype: torch.dtype) -> Self:
        """A layer with the parameters of another, whose weight is rounded to `dtype`."""
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        layer.weight = nn.Parameter(linear.weight.detach().to(dtype), linear.weight.requires_grad)
        layer.bias = linear.bias
        return layer

    def forward(self, input: Float[Tensor, "... n"]) -> Float[Tensor, "... m"]:
        dtype = self.weight.dtype
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.to(dtype), self.weight, None if self.bias is None else self.bias.to(dtype))
