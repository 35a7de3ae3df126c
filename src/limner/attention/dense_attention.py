"""`attend` of `attention.py` by torch's kernels, for short sequences, whose mask costs no more than sparse blocks.

Shapes: B batch, H heads, n queries, m keys, C head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

EXPLICIT_MAX_MASK = 512**2  # mask entries up to which a CPU computes explicit products


class DenseAttention(nn.Module):
    """softmax(q k^T / sqrt(C)) v over the keys that `mask`, bool [n, m], lets each query see.

    On a CPU, torch's kernel takes five times as long to train short sequences as explicit products, which store
    B * H * n * m weights.
    """

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask, persistent=False)

    def forward(
        self, q: Float[Tensor, "B H n C"], k: Float[Tensor, "B H n C"], v: Float[Tensor, "B H n C"]
    ) -> Float[Tensor, "B H n C"]:
        """Return the attention output: q [B, H, n, C], k and v [B, H, m, C] -> [B, H, n, C]."""
        if q.device.type != "cpu" or self.mask.numel() > EXPLICIT_MAX_MASK:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        bias = torch.zeros_like(self.mask, dtype=q.dtype).masked_fill_(~self.mask, -torch.inf)
        rows = q.shape[0] * q.shape[1]
        weights = torch.baddbmm(
            bias.expand(rows, *bias.shape), q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), alpha=q.shape[-1] ** -0.5
        ).softmax(-1)
        return (weights @ v.flatten(0, 1)).unflatten(0, q.shape[:2])
