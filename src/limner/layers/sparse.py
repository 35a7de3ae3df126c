"""The paper's sparse attention, computed sparsely (Ramesh et al. 2021, §2.2, Figure 11, App. B.1).

`attention.py` says what is visible with a dense mask; here only visible keys are worked on. Every image
position sees all of the prefix, so its scores against the prefix are one product. What it sees of the
image lies in a window of contiguous states, once the states are laid out for it:

    row     in raster order, blocks of whole rows; the window begins w positions before its block
    conv    the same, with a window that begins (k // 2) (w + 1) positions before
    column  rows and columns transposed: a block is a column, and its own window

A block's scores against its window, under one small mask, stand next to those against the prefix, and
one softmax runs over both (footnote 7). Work and memory grow with S * (P + window), not with (P + S)^2.
The prefix sees itself causally. The weights are not kept for the backward pass: they are computed again,
some heads at a time, so that what is alive at once stays in the processor's cache.

Shapes: B batch, H heads, P prefix, h x w grid, S = h * w, C head width; R some of the B * H sequences,
n blocks of q queries with m keys each in their windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limner.layers.attention import Kind, offsets

_QUERIES = 64  # of a block, at least, where the grid allows: small products keep no machine busy
Pair = tuple[Tensor, Tensor]

_WEIGHTS = 3 << 20  # attention weights of a part, several of which are alive at once


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
        later = torch.ones(prefix, prefix, dtype=torch.bool, device="cpu").triu(1)
        self.register_buffer("causal", torch.zeros(later.shape).masked_fill_(later, -torch.inf), persistent=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p, n = self.prefix, q.shape[2]
        if n != p + self.grid[0] * self.grid[1]:
            raise ValueError(f"{n} positions where {p} of prefix and a grid of {self.grid} were expected")
        return _Recomputed.apply(self, q, k, v)

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

    # Three linear maps and the derivative of the softmax are all of attention, forward and backward. `Pair`s hold
    # what belongs to queries of the prefix, [R, P, ...], and of the image, in blocks [R, n, q, ...]; or, of keys, the
    # prefix [R, P, C] and the windows [R, n, m, C].

    def queries_of(self, x: Tensor) -> Pair:
        """States [R, P + S, C] as those who look."""
        return x[:, : self.prefix], self._blocks(x[:, self.prefix :])

    def keys_of(self, x: Tensor) -> Pair:
        """States [R, P + S, C] as those who are seen."""
        return x[:, : self.prefix], self._windows(x[:, self.prefix :]).contiguous()

    def scores(self, queries: Pair, keys: Pair) -> Pair:
        """Products of queries with the keys that they may see: [R, P, P] and [R, n, q, P + m]."""
        (text, image), (prefix, windows) = queries, keys
        by_prefix = (image.flatten(1, 2) @ prefix.mT).unflatten(1, image.shape[1:3])
        return text @ prefix.mT, torch.cat([by_prefix, image @ windows.mT], -1)

    def mix(self, weights: Pair, values: Pair) -> Tensor:
        """Sums of what is seen, with weights shaped as scores: [R, P + S, C]."""
        p, (text, image), (prefix, windows) = self.prefix, weights, values
        of_prefix = (image[..., :p].flatten(1, 2) @ prefix).unflatten(1, image.shape[1:3])
        return torch.cat([text @ prefix, self._raster(of_prefix + image[..., p:] @ windows)], 1)

    def spread(self, weights: Pair, queries: Pair) -> Tensor:
        """The transpose of `mix`: what queries give back to the states that they saw, [R, P + S, C]."""
        p, (text, image), (y, blocks) = self.prefix, weights, queries
        of_prefix = image[..., :p].flatten(1, 2).contiguous()  # else the product copies it, slowly
        to_prefix = text.mT @ y + of_prefix.mT @ blocks.flatten(1, 2)
        return torch.cat([to_prefix, self._raster_windows(image[..., p:].mT @ blocks)], 1)

    def weights(self, queries: Pair, keys: Pair) -> Pair:
        """The softmax of scores, hidden keys at 0."""
        text, image = self.scores(queries, keys)
        image[..., self.prefix :] += self.bias.to(image.dtype)
        return (text + self.causal.to(text.dtype)).softmax(-1), image.softmax(-1)

    @property
    def at_once(self) -> int:
        """Sequences whose weights are alive at the same time."""
        return max(1, _WEIGHTS // (self.grid[0] * self.grid[1] * (self.prefix + self.window)))


class _Recomputed(torch.autograd.Function):
    """softmax(q k^T / sqrt(C)) v a few sequences at a time; backward computes the weights again."""

    @staticmethod
    def forward(ctx: Any, attention: SparseAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.attention = attention
        ctx.save_for_backward(q, k, v)
        out, scale = _like(q), q.shape[-1] ** -0.5
        with torch.autocast(q.device.type, enabled=False):  # as it is in the backward pass
            for part in _parts(q, attention.at_once):
                looking, keys, values = (x[part].flatten(0, 1) for x in (q, k, v))
                weights = attention.weights(attention.queries_of(looking * scale), attention.keys_of(keys))
                out[part] = attention.mix(weights, attention.keys_of(values)).view(out[part].shape)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        attention, (q, k, v) = ctx.attention, ctx.saved_tensors
        by_q, by_k, by_v, scale = _like(q), _like(k), _like(v), q.shape[-1] ** -0.5
        for part in _parts(q, attention.at_once):
            g, looking, keys, values = (x[part].flatten(0, 1) for x in (*upstream, q, k, v))
            g, looking = attention.queries_of(g), attention.queries_of(looking * scale)
            keys, values = attention.keys_of(keys), attention.keys_of(values)
            weights = attention.weights(looking, keys)
            by_weight = attention.scores(g, values)
            text, image = (
                torch._softmax_backward_data(y, w, -1, w.dtype) for y, w in zip(by_weight, weights, strict=True)
            )
            by_q[part] = attention.mix((text, image), keys).mul_(scale).view(by_q[part].shape)
            by_k[part] = attention.spread((text, image), looking).view(by_k[part].shape)
            by_v[part] = attention.spread(weights, g).view(by_v[part].shape)
        return None, by_q, by_k, by_v


def _like(x: Tensor) -> Tensor:
    """Room for [B, H, n, C] that lies in memory as [B, n, H, C], which is how the layers around it need it."""
    b, h, n, c = x.shape
    return x.new_empty(b, n, h, c).transpose(1, 2)


def _parts(x: Tensor, at_once: int) -> Iterator[tuple[slice, slice]]:
    """Rows and heads of [B, H, ...] to take together: at most `at_once` sequences, or one."""
    b, h = x.shape[:2]
    rows, groups = max(1, at_once // h), -(-h // at_once)
    heads = -(-h // groups)
    for row in range(0, b, rows):
        for head in range(0, h, heads):
            yield slice(row, row + rows), slice(head, head + heads)
