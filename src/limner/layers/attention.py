"""Self-attention over one stream of text and image tokens (Ramesh et al. 2021, §2.2, Figure 11).

The stream is a prefix of P positions (the text and the start-of-image position) and an image of
S = h * w positions in raster order. The prefix is causal; every image position sees all of it. What
an image position sees of the image depends on the layer's kind:

    row     itself and the w before it in raster order, so up to the same column of the row above
    column  itself and its column in the rows above
    conv    a causal k x k window around itself, in raster order (it wraps around row ends)
    dense   itself and everything before it; not in the paper, for comparison and small grids

One softmax runs over text and image keys together (footnote 7). This file is the readable form: a
dense mask over all positions. `Cache` keeps keys and values for decoding.

Shapes: B batch, H heads, P prefix, S image positions, N = P + S, D width, C = D / H.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limner.layers.linear import LinearFactory, plain

_WRITTEN_OUT = 512**2  # numel of a mask up to which `attend` writes the products out on a CPU

Kind = Literal["row", "column", "conv", "dense"]


def paper_pattern(depth: int) -> tuple[Kind, ...]:
    """App. B.1, layers counted from 1: the last is conv; column if (i - 2) mod 4 == 0; else row."""
    kinds: list[Kind] = ["column" if (i - 2) % 4 == 0 else "row" for i in range(1, depth)]
    return (*kinds, "conv")


def visible(kind: Kind, prefix: int, grid: tuple[int, int], kernel: int = 11) -> Tensor:
    """The mask of Figure 11: bool [N, N], True where the row's position sees the column's."""
    h, w = grid
    n = prefix + h * w
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    if kind == "dense":
        return mask
    t = torch.arange(h * w)
    back = t[:, None] - t[None, :]  # how many raster steps ago
    if kind == "row":
        seen = back <= w
    elif kind == "column":
        seen = back % w == 0
    else:  # (rows up, columns across) as raster steps; `tril` above keeps it causal
        reach = range(-(kernel // 2), kernel // 2 + 1)
        window = torch.tensor([rows * w + columns for rows in range(kernel // 2 + 1) for columns in reach])
        seen = torch.isin(back, window)
    mask[prefix:, prefix:] &= seen
    return mask


@dataclass
class Cache:
    """Keys and values of every layer, [B, H, N, C] each, filled up to `length` positions."""

    keys: list[Tensor]
    values: list[Tensor]
    length: int = 0

    def expand(self, n: int) -> Cache:
        """Every caption's entries repeated for `n` candidates: B -> B * n."""
        return Cache(
            [k.repeat_interleave(n, 0) for k in self.keys],
            [v.repeat_interleave(n, 0) for v in self.values],
            self.length,
        )


class Attention(nn.Module):
    """Multi-head self-attention. `mask` says who sees whom; the layer itself knows no pattern."""

    def __init__(self, width: int, heads: int, linear: LinearFactory = plain) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = linear(width, 3 * width)
        self.out = linear(width, width)

    def forward(self, x: Tensor, mask: Tensor, cache: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """x [B, n, D]: the last n of `mask.shape[1]` positions; mask bool [n, positions].

        With a cache, the new keys and values are written into it and the earlier ones are read.
        """
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        if cache is not None:
            end = mask.shape[1]
            keys, values = cache
            keys[:, :, end - n : end], values[:, :, end - n : end] = k, v
            k, v = keys[:, :, :end], values[:, :, :end]
        y = attend(q, k, v, mask)
        return self.out(y.transpose(1, 2).reshape(b, n, d))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(C)) v over the keys that `mask` [n, m] lets each query see.

    q [B, H, n, C], k and v [B, H, m, C] -> [B, H, n, C]. On a CPU, torch's kernel takes five times as
    long to train short sequences as the products written out, which store B * H * n * m weights.
    """
    if q.device.type != "cpu" or q.shape[-2] == 1 or mask.numel() > _WRITTEN_OUT:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
    rows = q.shape[0] * q.shape[1]
    weights = torch.baddbmm(
        bias.expand(rows, *mask.shape), q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), alpha=q.shape[-1] ** -0.5
    ).softmax(-1)
    return (weights @ v.flatten(0, 1)).unflatten(0, q.shape[:2])
