"""Self-attention over one stream of text and image tokens (Ramesh et al. 2021, §2.2, Figure 11).

The stream is a prefix of P positions (the text and the start-of-image position) and an image of
S = h * w positions in raster order. The prefix is causal; every image position sees all of it. What
an image position sees of the image depends on the layer's kind:

    row     itself and the w before it in raster order, so up to the same column of the row above
    column  itself and its column in the rows above
    conv    a causal k x k window around itself, in raster order (it wraps around row ends)
    dense   itself and everything before it; not in the paper, for comparison and small grids

One softmax runs over text and image keys together (footnote 7). This file is the readable form, with a
mask over all positions. `sparse.py` computes only what is visible, `cache.py` decodes.

Shapes: B batch, H heads, P prefix, S image positions, N = P + S, D width, C = D / H.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limner.layers.linear import LinearFactory, plain

_WRITTEN_OUT = 512**2  # numel of a mask up to which `attend` writes the products out on a CPU

Kind = Literal["row", "column", "conv", "dense"]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v [B, H, n, C] -> [B, H, n, C]


def paper_pattern(depth: int) -> tuple[Kind, ...]:
    """App. B.1, layers counted from 1: the last is conv; column if (i - 2) mod 4 == 0; else row."""
    kinds: list[Kind] = ["column" if (i - 2) % 4 == 0 else "row" for i in range(1, depth)]
    return (*kinds, "conv")


def offsets(kind: Kind, grid: tuple[int, int], kernel: int = 11) -> Tensor:
    """How many raster steps ago a position may be for an image position to see it, itself (0) first.

    On the CPU whatever the default device, so that models can be built on the meta device.
    """
    h, w = grid
    if kind == "row":
        return torch.arange(w + 1, device="cpu")
    if kind == "column":
        return torch.arange(0, h * w, w, device="cpu")
    if kind == "conv":  # (rows up, columns across) as raster steps
        reach = range(-(kernel // 2), kernel // 2 + 1)
        window = {up * w + across for up in range(kernel // 2 + 1) for across in reach}
        return torch.tensor(sorted(back for back in window if back >= 0), device="cpu")
    return torch.arange(h * w, device="cpu")


def visible(kind: Kind, prefix: int, grid: tuple[int, int], kernel: int = 11) -> Tensor:
    """The mask of Figure 11: bool [N, N], True where the row's position sees the column's."""
    n = prefix + grid[0] * grid[1]
    mask = torch.ones(n, n, dtype=torch.bool, device="cpu").tril()
    t = torch.arange(n - prefix, device="cpu")
    mask[prefix:, prefix:] = among(t[:, None] - t[None, :], offsets(kind, grid, kernel))
    return mask


def among(back: Tensor, steps: Tensor) -> Tensor:
    """Whether each number of raster steps is one of `steps`, none of which is negative: bool, of the shape of `back`.

    `torch.isin` with a table: it would sort, which takes gigabytes for the masks of long sequences.
    """
    most = int(steps.max())
    table = torch.zeros(most + 2, dtype=torch.bool, device="cpu")  # the last is for all others
    table[steps] = True
    return table[torch.where((back < 0) | (back > most), most + 1, back)]


class Attention(nn.Module):
    """Multi-head self-attention. `attend` says who sees whom; the layer itself knows no pattern."""

    def __init__(self, width: int, heads: int, linear: LinearFactory = plain) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = linear(width, 3 * width)
        self.out = linear(width, width)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """x [B, n, D] -> [B, n, D]."""
        b, n, d = x.shape
        q, k, v = (y.view(b, n, self.heads, d // self.heads).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(attend(q, k, v).transpose(1, 2).reshape(b, n, d))


class MaskedAttention(nn.Module):
    """The readable form: all scores, those that the mask [n, m] hides set to -inf."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, self.mask)


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
