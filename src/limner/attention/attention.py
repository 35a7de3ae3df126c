"""Self-attention over one stream of text and image tokens (Ramesh et al. 2021, §2.2, Figure 11).

The stream is a prefix of P positions (the text and the start-of-image position) and an image of
S = h * w positions in raster order. The prefix is causal; every image position sees the whole prefix. The layer's
pattern (`patterns.py`) selects visible image positions: row, column, conv or dense.

One softmax runs over text and image keys together (footnote 7). This file is the readable form, with a mask over all
positions. Models run equivalents: `sparse.py` in training, `cache.py` in decoding.

Shapes: B batch, H heads, P prefix, S image positions, N = P + S, D width, C = D / H.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from limner.attention.patterns import Pattern

__all__ = ["Attention", "AttentionFn", "attend", "attention_mask"]

AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v [B, H, n, C] -> [B, H, n, C]


class Attention(nn.Module):
    """Multi-head self-attention. `attention_fn` applies the pattern; the layer is independent of patterns.

    With `qk_norm`, queries and keys are normalized (Dehghani et al. 2023), which bounds their products.
    """

    def __init__(self, width: int, heads: int, qk_norm: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.q_norm, self.k_norm = (nn.LayerNorm(width // heads) if qk_norm else nn.Identity() for _ in range(2))

    def forward(self, x: Float[Tensor, "B n D"], attention_fn: AttentionFn) -> Float[Tensor, "B n D"]:
        """Return the attention output: x [B, n, D] -> [B, n, D]."""
        b, n, d = x.shape
        q, k, v = (y.view(b, n, self.heads, d // self.heads).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        return self.out(attention_fn(q, k, v).transpose(1, 2).reshape(b, n, d))


def attention_mask(pattern: Pattern, prefix: int) -> Bool[Tensor, "N N"]:
    """Return the mask of Figure 11: bool [N, N], True where the row's position sees the column's."""
    n = prefix + pattern.grid[0] * pattern.grid[1]
    mask = torch.ones(n, n, dtype=torch.bool, device="cpu").tril()
    t = torch.arange(n - prefix, device="cpu")
    mask[prefix:, prefix:] = pattern.allows(t[:, None] - t[None, :])
    return mask


def attend(
    q: Float[Tensor, "B H n C"], k: Float[Tensor, "B H m C"], v: Float[Tensor, "B H m C"], mask: Bool[Tensor, "n m"]
) -> Float[Tensor, "B H n C"]:
    """Return softmax(q k^T / sqrt(C)) v over the keys that `mask` [n, m] lets each query see.

    q [B, H, n, C], k and v [B, H, m, C] -> [B, H, n, C].
    """
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return weights @ v
