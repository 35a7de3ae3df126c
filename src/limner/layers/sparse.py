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

from collections.abc import Iterable
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

    def _raster_windows(self, x: Tensor) -> Tensor:
        """The transpose of `_windows`: what lies in several windows [R, n, m, C] is added up, [R, S, C]."""
        if self.kind == "column":
            return self._raster(x)
        size = self.blocks * self.queries
        whole = x.new_zeros(len(x), -(-self.window // self.queries) * self.queries + size, x.shape[-1])
        for begin in range(0, self.window, self.queries):  # a part of all windows, as long as a block, does not overlap
            part = x[:, :, begin : begin + self.queries]
            whole[:, begin : begin + size].unflatten(1, (self.blocks, -1))[:, :, : part.shape[2]] += part
        return whole[:, self.reach : self.reach + size]

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Products of blocks [R, n, q, C] with the states [R, P + S, C] that they may see, [R, n, q, P + m]."""
        p = self.prefix
        by_prefix = q.flatten(1, 2) @ k[:, :p].mT
        return torch.cat([by_prefix.unflatten(1, q.shape[1:3]), q @ self._windows(k[:, p:]).mT], -1)

    def mix(self, weights: Tensor, v: Tensor) -> Tensor:
        """Sums of states [R, P + S, C] with weights [R, n, q, P + m], in blocks [R, n, q, C]."""
        p = self.prefix
        of_prefix = weights[..., :p].flatten(1, 2) @ v[:, :p]
        return of_prefix.unflatten(1, weights.shape[1:3]) + weights[..., p:] @ self._windows(v[:, p:])

    def spread(self, weights: Tensor, y: Tensor) -> Tensor:
        """The transpose of `mix`: blocks [R, n, q, C] to the states that they saw, [R, P + S, C]."""
        p = self.prefix
        to_prefix = weights[..., :p].flatten(1, 2).mT @ y.flatten(1, 2)
        return torch.cat([to_prefix, self._raster_windows(weights[..., p:].mT @ y)], 1)

    def weights(self, q: Tensor, k: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """q [R, S, C] in blocks and scaled, and its weights."""
        q = self._blocks(q * q.shape[-1] ** -0.5)
        scores = self.scores(q, k)
        scores[..., self.prefix :] += bias
        return q, scores.softmax(-1)

    @property
    def at_once(self) -> int:
        """Sequences whose weights are alive at the same time."""
        return max(1, _WEIGHTS // (self.grid[0] * self.grid[1] * (self.prefix + self.window)))


class _Recomputed(torch.autograd.Function):
    """The image positions' attention, q [R, S, C], k and v [R, P + S, C] -> [R, S, C], a few sequences at a time;
    backward computes the weights again."""

    @staticmethod
    def forward(ctx: Any, attention: SparseAttention, bias: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.attention = attention
        ctx.save_for_backward(bias, q, k, v)
        found = []
        with torch.autocast(q.device.type, enabled=False):  # as it is in the backward pass
            for part_q, part_k, part_v in _parts(attention, q, k, v):
                _, weights = attention.weights(part_q, part_k, bias)
                found.append(attention._raster(attention.mix(weights, part_v)))
        return torch.cat(found)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        attention, (bias, *states) = ctx.attention, ctx.saved_tensors
        found = []
        for q, k, v, g in _parts(attention, *states, upstream[0]):
            scaled, weights = attention.weights(q, k, bias)
            g = attention._blocks(g)
            by_score = torch._softmax_backward_data(attention.scores(g, v), weights, -1, weights.dtype)
            by_q = attention._raster(attention.mix(by_score, k)) * q.shape[-1] ** -0.5
            found.append((by_q, attention.spread(by_score, scaled), attention.spread(weights, g)))
        return None, None, *(torch.cat(grads) for grads in zip(*found, strict=True))


def _parts(attention: SparseAttention, *states: Tensor) -> Iterable[tuple[Tensor, ...]]:
    return zip(*(x.split(attention.at_once) for x in states), strict=True)
