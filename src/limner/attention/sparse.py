"""Attention in training: the paper's patterns, computed sparsely (Ramesh et al. 2021, §2.2, Figure 11, App. B.1).

`attention.py` defines visibility by a dense mask. `DenseAttention` applies that mask, for short sequences.
`SparseAttention` reads only windows around visible keys. Queries of the image are grouped into blocks of consecutive
positions in raster order (transposed for patterns that see only their own column). The image keys that a block sees are
then within a window, which ends with the block and begins before it by the span of the pattern:

    row     w
    conv    (k // 2) (w + 1)
    column  0: a block is whole columns

Every image position sees the whole prefix. So the keys of a block are the prefix and its window, concatenated, and one
softmax under one small mask runs over both (footnote 7). Work and memory grow with S * (P + window), not with
(P + S)^2. The prefix is causal. The backward pass recomputes the weights, some heads at a time, to bound memory. On a
GPU one kernel does these steps for the patterns it supports (`flex.py`).

Shapes: B batch, H heads, P prefix, h x w grid, S = h * w, N = P + S, C head width; R some of the B * H sequences,
n blocks of q queries with m keys each in their windows.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from limner import compat
from limner.attention import flex
from limner.attention.attention import attention_mask
from limner.attention.patterns import Pattern
from limner.numerics.precision import product

__all__ = ["DenseAttention", "SparseAttention", "training_attention"]

EXPLICIT_MAX_MASK = 512**2  # mask entries up to which a CPU computes explicit products
DENSE_MAX_POSITIONS = 256  # positions up to which a dense mask is as fast
MIN_QUERIES = 64  # of a block, at least, where the grid allows: small products underuse the hardware
_KEY_MULTIPLE = 8  # keys of a block are a multiple of this: odd numbers make slow products
CPU_WEIGHTS_PER_PART = 3 << 19  # attention weights of a part: several parts together fit a CPU's caches
GPU_WEIGHTS_PER_PART = 1 << 26  # of a part on a GPU, where kernels of small parts take longer to launch than to run


def training_attention(pattern: Pattern, prefix: int) -> nn.Module:
    """Return the attention of a pattern for training: sparse, or masked where a mask costs no more."""
    h, w = pattern.grid
    if len(pattern.offsets) == h * w or prefix + h * w <= DENSE_MAX_POSITIONS:
        return DenseAttention(attention_mask(pattern, prefix))
    return SparseAttention(pattern, prefix)


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


class SparseAttention(nn.Module):
    """softmax(q k^T / sqrt(C)) v over the keys that the pattern lets each of the P + S positions see.

    Takes q, k, v [B, H, P + S, C]; equals `attend` under the mask `attention_mask(pattern, prefix)`. Raises
    `ValueError` for another number of positions.
    """

    bias: Tensor
    causal: Tensor

    def __init__(self, pattern: Pattern, prefix: int) -> None:
        super().__init__()
        self.pattern, self.prefix = pattern, prefix
        lanes, length = pattern.grid[::-1] if pattern.by_column else pattern.grid  # consecutive positions
        per_block = next(n for n in range(1, lanes + 1) if lanes % n == 0 and (n * length >= MIN_QUERIES or n == lanes))
        self.queries, self.blocks = per_block * length, lanes // per_block
        span = 0 if pattern.by_column else pattern.span
        self.span = span + -(prefix + self.queries + span) % _KEY_MULTIPLE
        self.window = self.queries + self.span
        self.register_buffer("bias", self._bias(), persistent=False)
        later = torch.ones(prefix, prefix, dtype=torch.bool, device="cpu").triu(1)
        self.register_buffer("causal", torch.where(later, -torch.inf, 0.0), persistent=False)

    def forward(
        self, q: Float[Tensor, "B H n C"], k: Float[Tensor, "B H n C"], v: Float[Tensor, "B H n C"]
    ) -> Float[Tensor, "B H n C"]:
        p, n = self.prefix, q.shape[2]
        if n != p + self.blocks * self.queries:
            raise ValueError(f"expected {p} prefix positions and a {self.pattern.grid} grid, not {n} positions")
        if flex.supports(self.pattern, q) and (y := flex.attend(self.pattern, p, q, k, v)) is not None:
            return y
        return _RecomputedAttention.apply(self, q, k, v)

    def _bias(self) -> Tensor:
        """Return 0 where a query of a block sees a key, else -inf: [n, q, P + m]."""
        at = torch.arange(1, self.blocks * self.queries + 1, device="cpu").view(1, -1, 1)
        query, key = self._to_lanes(at).view(self.blocks, self.queries, 1), self._windows(at)[0].transpose(1, 2)
        visible = self.pattern.allows(query - key) & (key > 0)  # 0: before the image
        return torch.where(F.pad(visible, (self.prefix, 0), value=True), 0.0, -torch.inf)

    def _windows(self, x: Tensor) -> Tensor:
        """Copy image states into the blocks' windows, [R, S, C] -> [R, n, m, C], with zeros before the image."""
        return F.pad(self._to_lanes(x), (0, 0, self.span, 0)).unfold(1, self.window, self.queries).transpose(2, 3)

    def _raster_windows(self, x: Tensor) -> Tensor:
        """Sum windows over each position, [R, n, m, C] -> [R, S, C]: the transpose of `_windows`."""
        size = self.blocks * self.queries
        padded = x.new_zeros(len(x), -(-self.window // self.queries) * self.queries + size, x.shape[-1])
        for begin in range(0, self.window, self.queries):  # parts as long as a block do not overlap
            part = x[:, :, begin : begin + self.queries]
            padded[:, begin : begin + size].unflatten(1, (self.blocks, -1))[:, :, : part.shape[2]] += part
        return self._to_raster(padded[:, self.span : self.span + size])

    def _to_lanes(self, x: Tensor) -> Tensor:
        return flex.to_column_order(x, self.pattern.grid) if self.pattern.by_column else x

    def _to_raster(self, x: Tensor) -> Tensor:
        h, w = self.pattern.grid
        return flex.to_column_order(x, (w, h)) if self.pattern.by_column else x

    # Prefix and image are two attentions with separate queries, keys and values. `split_queries`, `gather_keys` and
    # their transposes join them.

    def split_queries(self, x: Float[Tensor, "R N C"]) -> tuple[Float[Tensor, "R P C"], Float[Tensor, "Rn q C"]]:
        """Split states [R, P + S, C] into queries of the prefix [R, P, C] and of image blocks [R n, q, C]."""
        return x[:, : self.prefix], self._to_lanes(x[:, self.prefix :]).unflatten(1, (self.blocks, -1)).flatten(0, 1)

    def merge_queries(self, parts: Iterable[Tensor]) -> Float[Tensor, "R N C"]:
        """Invert `split_queries`; also its transpose."""
        prefix, blocks = parts
        return torch.cat([prefix, self._to_raster(blocks.unflatten(0, (-1, self.blocks)).flatten(1, 2))], 1)

    def gather_keys(self, x: Float[Tensor, "R N C"]) -> tuple[Float[Tensor, "R P C"], Float[Tensor, "Rn keys C"]]:
        """Return keys or values [R, P + S, C] for the prefix, [R, P, C], and for blocks, [R n, P + m, C]."""
        p, prefix = self.prefix, x[:, : self.prefix]
        keys = x.new_empty(len(x), self.blocks, p + self.window, x.shape[-1])
        keys[:, :, :p] = prefix[:, None]
        keys[:, :, p:] = self._windows(x[:, p:])
        return prefix, keys.flatten(0, 1)

    def scatter_keys(self, parts: Iterable[Tensor]) -> Float[Tensor, "R N C"]:
        """Sum the gradients of all copies of a state, [R, P + S, C]: the transpose of `gather_keys`."""
        prefix, keys = parts
        p, keys = self.prefix, keys.unflatten(0, (-1, self.blocks))
        return torch.cat([prefix + keys[:, :, :p].sum(1), self._raster_windows(keys[:, :, p:])], 1)

    def weights(self, queries: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return softmax weights, from scores in `acc_type`, in the keys' format: [R, P, P] and [R n, q, P + m]."""
        text, image = (product(q, k.mT) for q, k in zip(queries, keys, strict=True))
        image.unflatten(0, (-1, self.blocks)).add_(self.bias)
        dtype = keys[0].dtype
        return text.add_(self.causal).softmax(-1).to(dtype), image.softmax(-1).to(dtype)

    def sequences_per_part(self, device: str) -> int:
        """Return the number of sequences whose weights are in memory together on a device type."""
        return max(1, (CPU_WEIGHTS_PER_PART if device == "cpu" else GPU_WEIGHTS_PER_PART) // self.bias.numel())


class _RecomputedAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(C)) v, a few sequences at a time; the backward pass recomputes the weights."""

    @staticmethod
    def forward(ctx: Any, attention: SparseAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.attention = attention
        ctx.save_for_backward(q, k, v)
        out, scale = _empty_like(q), q.shape[-1] ** -0.5
        with torch.autocast(q.device.type, enabled=False):  # as in the backward pass
            for part in _parts(q, attention.sequences_per_part(q.device.type)):
                queries, keys, values = (x[part].flatten(0, 1) for x in (q, k, v))
                weights = attention.weights(attention.split_queries(queries * scale), attention.gather_keys(keys))
                outputs = _matmul_each(weights, attention.gather_keys(values))
                out[part] = attention.merge_queries(outputs).view(out[part].shape)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError("sparse attention cannot be differentiated twice: build the model with pattern='dense'")
        attention, (q, k, v) = ctx.attention, ctx.saved_tensors
        by_q, by_k, by_v, scale = _empty_like(q), _empty_like(k), _empty_like(v), q.shape[-1] ** -0.5
        for part in _parts(q, attention.sequences_per_part(q.device.type)):
            g, queries, keys, values = (x[part].flatten(0, 1) for x in (*upstream, q, k, v))
            g, queries = attention.split_queries(g), attention.split_queries(queries * scale)
            keys, values = attention.gather_keys(keys), attention.gather_keys(values)
            weights = attention.weights(queries, keys)
            by_v[part] = attention.scatter_keys(_matmul_each(_transpose_each(weights), g)).view(by_v[part].shape)
            by_weight = _matmul_each(g, _transpose_each(values))
            by_score = [
                compat.softmax_backward_data(y, w, -1, w.dtype) for y, w in zip(by_weight, weights, strict=True)
            ]
            by_q[part] = attention.merge_queries(_matmul_each(by_score, keys)).mul_(scale).view(by_q[part].shape)
            by_k[part] = attention.scatter_keys(_matmul_each(_transpose_each(by_score), queries)).view(by_k[part].shape)
        return None, by_q, by_k, by_v


def _matmul_each(left: Iterable[Tensor], right: Iterable[Tensor]) -> list[Tensor]:
    return [x @ y for x, y in zip(left, right, strict=True)]


def _transpose_each(matrices: Iterable[Tensor]) -> list[Tensor]:
    return [x.mT for x in matrices]


def _empty_like(x: Tensor) -> Tensor:
    """Return an uninitialized [B, H, n, C] stored as [B, n, H, C], the layout that the surrounding layers need."""
    b, h, n, c = x.shape
    return x.new_empty(b, n, h, c).transpose(1, 2)


def _parts(x: Tensor, sequences_per_part: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of rows and heads of [B, H, ...], of 1 to `sequences_per_part` sequences each."""
    b, h = x.shape[:2]
    rows, groups = max(1, sequences_per_part // h), -(-h // sequences_per_part)
    heads = -(-h // groups)
    for row in range(0, b, rows):
        for head in range(0, h, heads):
            yield slice(row, row + rows), slice(head, head + heads)
