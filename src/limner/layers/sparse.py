"""The paper's sparse attention, computed sparsely (Ramesh et al. 2021, §2.2, Figure 11, App. B.1).

`attention.py` says what is visible with a dense mask; here only visible keys are worked on. Every image
position sees all of the prefix, so its scores against the prefix are one product. What it sees of the
image lies in a window of contiguous states, once the states are laid out for it:

    row     in raster order, blocks of whole rows; the window begins w positions before its block
    conv    the same, with a window that begins (k // 2) (w + 1) positions before
    column  rows and columns transposed: a block is a column, and its own window

A block's scores against its window, under one small mask, stand next to those against the prefix, and
one softmax runs over both (footnote 7). Work and memory grow with S * (P + window), not with (P + S)^2.
The weights are not kept for the backward pass: they are computed again, some heads at a time, so that
what is alive at once stays in the processor's cache.

Shapes: B batch, H heads, P prefix, h x w grid, S = h * w, C head width; R some of the B * H sequences,
n blocks of q queries with m keys each in their windows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limner.layers.attention import Kind, attend, offsets

_QUERIES = 64  # of a block, at least, where the grid allows: small products keep no machine busy
_WEIGHTS = 1 << 22  # attention weights alive at once


class SparseAttention(nn.Module):
    """softmax(q k^T / sqrt(C)) v over what `kind` lets each of the P + S positions see.

    Called with q, k, v [B, H, P + S, C]; equals `attend` under the mask `visible(kind, prefix, grid, kernel)`.
    """

    bias: Tensor
    causal: Tensor

    def __init__(self, kind: Kind, prefix: int, grid: tuple[int, int], kernel: int = 11) -> None:
        super().__init__()
        self.kind: Kind = kind
        self.prefix, self.grid, self.kernel = prefix, grid, kernel
        h, w = grid
        if kind == "column":
            self.queries, self.reach, self.window = h, 0, h
        else:
            self.reach = min(int(offsets(kind, grid, kernel).max()), h * w)
            rows = next(r for r in range(1, h + 1) if h % r == 0 and (r * w >= _QUERIES or r == h))
            self.queries, self.window = rows * w, rows * w + self.reach
        self.blocks = h * w // self.queries
        self.register_buffer("bias", self._bias(), persistent=False)
        self.register_buffer("causal", torch.ones(prefix, prefix, dtype=torch.bool).tril(), persistent=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = self.prefix
        if q.shape[2] != p + self.grid[0] * self.grid[1]:
            raise ValueError(f"{q.shape[2]} positions where {p} of prefix and a grid of {self.grid} were expected")
        text = attend(q[:, :, :p], k[:, :, :p], v[:, :, :p], self.causal)
        image = _Recomputed.apply(self, self.bias.to(q.dtype), *(x.flatten(0, 1) for x in (q[:, :, p:], k, v)))
        return torch.cat([text, image.unflatten(0, q.shape[:2])], 2)

    def _bias(self) -> Tensor:
        """0 where a query of a block sees a key of its window, else -inf: [n, q, m]."""
        h, w = self.grid
        query = self._blocks(torch.arange(h * w, device="cpu").view(1, h * w, 1)).view(self.blocks, self.queries, 1)
        key = self._windows(torch.arange(1, h * w + 1, device="cpu").view(1, h * w, 1))
        key = key.view(self.blocks, 1, self.window) - 1
        back = query - key  # a key of -1 lies before the image
        seen = torch.isin(back, offsets(self.kind, self.grid, self.kernel)) & (key >= 0)
        return torch.zeros(seen.shape, device="cpu").masked_fill_(~seen, -torch.inf)

    def _blocks(self, x: Tensor) -> Tensor:
        """Image states in raster order [R, S, C] -> [R, n, q, C]."""
        if self.kind == "column":
            return x.unflatten(1, self.grid).transpose(1, 2)
        return x.unflatten(1, (self.blocks, self.queries))

    def _raster(self, x: Tensor) -> Tensor:
        """The inverse of `_blocks`."""
        return (x.transpose(1, 2) if self.kind == "column" else x).flatten(1, 2)

    def _windows(self, x: Tensor) -> Tensor:
        """Image states [R, S, C] -> what the blocks see, [R, n, m, C]; zeros before the image."""
        if self.kind == "column":
            return self._blocks(x)
        return F.pad(x, (0, 0, self.reach, 0)).unfold(1, self.window, self.queries).transpose(2, 3)

    def image(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """The image positions' attention: q [R, S, C]; k, v [R, P + S, C] -> [R, S, C]."""
        p, r, c = self.prefix, q.shape[0], q.shape[-1]
        q = self._blocks(q * c**-0.5)
        flat = q.reshape(r, -1, c)
        by_window = q @ self._windows(k[:, p:]).transpose(2, 3) + bias
        by_prefix = (flat @ k[:, :p].transpose(1, 2)).view(r, self.blocks, self.queries, p)
        weights = torch.cat([by_prefix, by_window], -1).softmax(-1)
        of_prefix = weights[..., :p].reshape(r, -1, p) @ v[:, :p]
        of_window = weights[..., p:] @ self._windows(v[:, p:])
        return self._raster(of_prefix.view(q.shape) + of_window)

    @property
    def at_once(self) -> int:
        """Sequences whose weights are alive at the same time."""
        return max(1, _WEIGHTS // (self.grid[0] * self.grid[1] * (self.prefix + self.window)))


class _Recomputed(torch.autograd.Function):
    """`SparseAttention.image` a few sequences at a time, forward and, computed again, backward."""

    @staticmethod
    def forward(ctx: Any, attention: SparseAttention, bias: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.attention = attention
        ctx.save_for_backward(bias, q, k, v)
        parts = zip(*(x.split(attention.at_once) for x in (q, k, v)), strict=True)
        with torch.autocast(q.device.type, enabled=False):  # as it is in the backward pass
            return torch.cat([attention.image(part[0], part[1], part[2], bias) for part in parts])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        bias, *states = ctx.saved_tensors
        found: list[tuple[Tensor, ...]] = []
        for q, k, v, g in zip(*(x.split(ctx.attention.at_once) for x in (*states, upstream[0])), strict=True):
            part = [x.detach().requires_grad_() for x in (q, k, v)]
            with torch.enable_grad():
                y = ctx.attention.image(part[0], part[1], part[2], bias)
            found.append(torch.autograd.grad(y, part, g))
        return None, None, *(torch.cat(grads) for grads in zip(*found, strict=True))
