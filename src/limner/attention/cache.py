"""A decoding cache: the keys and values that later positions can still see under each layer's pattern.

All candidates of a caption share the prefix, whose keys and values are stored once and read once per step. For the
image, a candidate holds

    row     a ring of w + 1 positions
    conv    a ring of (k // 2) (w + 1) + 1 positions, of which a mask hides those outside the window
    column  a ring of h positions for each column, of which a step reads one
    dense   a ring of all S

as `patterns.py` defines. A step reads the written slots of its lane's ring, and a mask hides the pattern's gaps.
At the paper's size (64 layers, 32 x 32 tokens) a candidate holds 283 positions per layer on average. A dense cache
holds 1,280, with a copy of the text for each candidate. A candidate's states are stored in the model's format, or as
int8 with a scale for each position and head.

A position is an integer or a tensor [1]. With a tensor, every step runs the same operations on the same memory, so
that a CUDA graph can replay it (`sampling/cuda_graph.py`), but reads the whole ring and masks unwritten slots. On a GPU
one kernel does the whole step (`triton_decode.py`).

A step of several positions has a first position for each row, a tensor [M, 1]. Its later tokens may turn out to be
wrong: decoding then continues from an earlier position, without copying. A ring has spare slots for these tokens. A
slot of a later position counts as one too far back to be visible, and the next step overwrites it.

Shapes: B captions, N candidates of each, M = B * N, H heads, P prefix, C head width; n positions held, L lanes (the
columns of a pattern that sees only its own column, else 1), of which a position reads one; W positions; K rows kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from limner.attention.attention import AttentionFn
from limner.attention.patterns import Pattern
from limner.numerics.compile_elementwise import can_launch_triton

Position = int | Tensor  # a tensor is int64 [1], or [M, 1] with a position for each row

# A step that reads more than this part of a lane reads the whole lane under a mask, since a product copies slices.
_FULL_READ_FRACTION = 1 / 4


class KVStore:
    """Keys or values of candidates, [L, M, H, n / L, C], in the model's format. A lane is contiguous."""

    def __init__(self, like: Tensor, num_lanes: int, n: int) -> None:
        """Allocate for the candidates, heads, width and format of `like` [M, H, ..., C]."""
        self.parts: list[Tensor] = [like.new_zeros(num_lanes, *like.shape[:2], n // num_lanes, like.shape[-1])]

    def write(self, lane: Position, slot: Position, x: Float[Tensor, "M H W C"]) -> None:
        """Store the states of one position of each candidate, or of W positions with lanes and slots [M, W]."""
        _write(self.parts[0], lane, slot, x)

    def read(self, lane: Position, slots: int) -> Float[Tensor, "M H slots C"]:
        """Return the states in the first slots of a lane; with lanes [M, W], [M * W, H, slots, C]."""
        return _lane(self.parts[0], lane)[:, :, :slots]

    def map(self, function: Callable[[Tensor], Tensor]) -> KVStore:
        """Return a store of `function(part)` for each part [L, M, H, n / L, ...]."""
        mapped = copy(self)
        mapped.parts = [function(part) for part in self.parts]
        return mapped

    @property
    def bytes_per_candidate(self) -> int:
        return sum(part[:, 0].numel() * part.element_size() for part in self.parts)


class Int8KVStore(KVStore):
    """A store in int8, with a scale absmax / 127 for each position and head."""

    def __init__(self, like: Tensor, num_lanes: int, n: int) -> None:
        super().__init__(like, num_lanes, n)
        values = self.parts[0]
        self.parts = [values.to(torch.int8), values.new_ones(*values.shape[:-1], 1)]

    def write(self, lane: Position, slot: Position, x: Float[Tensor, "M H W C"]) -> None:
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-6) / 127
        _write(self.parts[0], lane, slot, (x / scale).round().clamp(-127, 127).to(torch.int8))
        _write(self.parts[1], lane, slot, scale)

    def read(self, lane: Position, slots: int) -> Float[Tensor, "M H slots C"]:
        values, scale = (_lane(part, lane)[:, :, :slots] for part in self.parts)
        return values * scale


def _write(part: Tensor, lane: Position, slot: Position, x: Tensor) -> None:
    if isinstance(slot, Tensor) and slot.ndim == 2:
        part[lane, torch.arange(x.shape[0], device=x.device)[:, None], :, slot] = x.transpose(1, 2)
    else:
        part[lane, :, :, slot] = x[:, :, 0]


def _lane(part: Tensor, lane: Position) -> Tensor:
    """Return a lane of a part, [M, H, n / L, C]; a copy if `lane` is a tensor and the part has several lanes. With
    lanes [M, W], return one for each of M * W queries."""
    if len(part) == 1:
        return part[0]
    if isinstance(lane, Tensor) and lane.ndim == 2:
        return part[lane, torch.arange(lane.shape[0], device=part.device)[:, None]].flatten(0, 1)
    return part[lane].view(part.shape[1:])


@dataclass
class LayerKVCache:
    """Keys and values of one layer: prefix [B, H, P, C] and image.

    `gap_bias` [n / L], by steps back in a lane, is -inf for positions held but not visible (the pattern's gaps, and the
    spare slots), else 0.
    """

    num_lanes: int
    has_gaps: bool
    gap_bias: Tensor
    prefix_keys: Tensor
    prefix_values: Tensor
    keys: KVStore
    values: KVStore

    @classmethod
    def from_prefix(
        cls,
        pattern: Pattern,
        keys: Float[Tensor, "B H P C"],
        values: Float[Tensor, "B H P C"],
        store: type[KVStore] = KVStore,
        window: int = 1,
    ) -> LayerKVCache:
        """Return the cache after the prefix, given its keys and values, with one candidate per caption, for steps of up
        to `window` positions."""
        empty = (store(x, pattern.num_lanes, pattern.cache_slots(window)) for x in (keys, values))
        gap_bias = _gap_bias(pattern, pattern.ring_size(window), keys.device, keys.dtype)
        has_gaps = len(pattern.offsets) < len(gap_bias)
        return cls(pattern.num_lanes, has_gaps, gap_bias, keys, values, *empty)

    def map(self, function: Callable[[Tensor], Tensor]) -> LayerKVCache:
        """Apply `KVStore.map` to keys and values of the candidates; the prefix stays shared."""
        return replace(self, keys=self.keys.map(function), values=self.values.map(function))

    @property
    def buffers(self) -> list[Tensor]:
        """All tensors of the cache."""
        return [self.prefix_keys, self.prefix_values, *self.keys.parts, *self.values.parts]

    def bind(self, buffers: Iterator[Tensor]) -> LayerKVCache:
        """Return a cache backed by the next tensors of an iterator, in the order of the property `buffers`."""
        prefix = {"prefix_keys": next(buffers), "prefix_values": next(buffers)}
        return replace(self, **prefix).map(lambda _: next(buffers))

    def append(
        self, position: Position, q: Float[Tensor, "M H W C"], k: Float[Tensor, "M H W C"], v: Float[Tensor, "M H W C"]
    ) -> Float[Tensor, "M H W C"]:
        """Store the keys and values of W image positions from `position`, and return the attention output at them.

        Several positions need a position for each row, [M, 1].
        """
        if isinstance(position, Tensor) and position.ndim == 2:
            return self._append_window(position + torch.arange(q.shape[2], device=q.device), q, k, v)
        if isinstance(position, Tensor) and self._fused(q, k, v):
            from limner.attention import triton_decode

            rings = self.keys.parts[0], self.values.parts[0]
            prefix = self.prefix_keys, self.prefix_values
            return triton_decode.attend(position, q, k, v, prefix, rings, self.gap_bias)
        lane, step = position % self.num_lanes, position // self.num_lanes
        slots = self._slots(step)
        sees_all = isinstance(step, int) and slots <= step + 1 and not self.has_gaps
        return self._attend(q, *self._exchange(lane, step, slots, k, v), None if sees_all else self._bias(step, slots))

    def _append_window(self, position: Int64[Tensor, "M W"], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lane, step = position % self.num_lanes, position // self.num_lanes
        keys, values = self._exchange(lane, step, len(self.gap_bias), k, v)
        bias = self._bias(step[..., None], len(self.gap_bias))
        if self.num_lanes == 1:
            return self._attend(q, keys, values, bias[:, None])
        each = q.transpose(1, 2).flatten(0, 1)[:, :, None]  # as M * W rows, since each position has its own lane
        output = self._attend(each, keys, values, bias.flatten(0, 1)[:, None, None])
        return output.view(q.shape[0], -1, *q.shape[1::2]).transpose(1, 2)

    def _exchange(self, lane: Position, step: Position, slots: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values, then return those of the lane."""
        self.keys.write(lane, step % len(self.gap_bias), k)
        self.values.write(lane, step % len(self.gap_bias), v)
        return self.keys.read(lane, slots), self.values.read(lane, slots)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
        """Attend from q [M, H, W, C] to the prefix and to keys and values [M, H, slots, C]."""
        b, heads, p, c = self.prefix_keys.shape
        w, q = q.shape[2], q * c**-0.5
        grouped = q.view(b, -1, heads, w, c).transpose(1, 2).reshape(b, heads, -1, c)  # one product for all candidates
        prefix_scores = _ungroup(grouped @ self.prefix_keys.transpose(2, 3), w)
        image_scores = q @ keys.transpose(2, 3)
        if bias is not None:
            image_scores = image_scores + bias
        weights = torch.cat([prefix_scores, image_scores], -1).softmax(-1)  # accumulates in fp32 for every format
        grouped = weights[..., :p].view(b, -1, heads, w, p).transpose(1, 2).reshape(b, heads, -1, p)
        return _ungroup(grouped @ self.prefix_values, w) + weights[..., p:] @ values

    def _fused(self, *states: Tensor) -> bool:
        """Return True if `triton_decode.py` attends: on a GPU, in the model's format, outside `torch.compile`."""
        if not can_launch_triton(states[0]) or type(self.keys) is not KVStore:
            return False
        from limner.attention import triton_decode

        return triton_decode.supports(*states, self.prefix_keys, self.prefix_values, self.keys.parts[0])

    def _slots(self, step: Position) -> int:
        """Return the number of slots to read for the `step`-th position of a lane."""
        ring_size = len(self.gap_bias)
        written = ring_size if isinstance(step, Tensor) else min(step + 1, ring_size)
        return ring_size if written > ring_size * _FULL_READ_FRACTION else written

    def _bias(self, step: Position, slots: int) -> Tensor:
        """Return -inf for slots that the position must not see, else 0."""
        n = len(self.gap_bias)  # added, since the remainder of a negative number is another one in ExecuTorch
        back = (step + n - torch.arange(slots, device=self.gap_bias.device)) % n
        return self.gap_bias[back].masked_fill_(back > step, -torch.inf)  # not yet written: back > step


def _ungroup(x: Float[Tensor, "B H N*W K"], w: int) -> Float[Tensor, "B*N H W K"]:
    return x.unflatten(2, (-1, w)).transpose(1, 2).flatten(0, 1)


@lru_cache(maxsize=16)
def _gap_bias(pattern: Pattern, ring_size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return -inf for the steps back in a lane that the pattern does not see, else 0: [ring_size]."""
    with torch.inference_mode(False):
        visible = pattern.allows(pattern.num_lanes * torch.arange(ring_size, device="cpu"))
        return torch.zeros(ring_size, device="cpu").masked_fill_(~visible, -torch.inf).to(device, dtype)


@dataclass
class KVCache:
    """The caches of all layers, with `length` image positions read."""

    layers: Sequence[LayerKVCache]
    length: Position = 0  # if a tensor [M, 1], of each row

    def expand(self, n: int) -> KVCache:
        """Repeat each caption's candidates `n` times, M -> M * n."""
        length = self.length.repeat_interleave(n, 0) if isinstance(self.length, Tensor) else self.length
        return KVCache([layer.map(lambda x: x.repeat_interleave(n, 1)) for layer in self.layers], length)

    def select(self, rows: Int64[Tensor, " K"]) -> KVCache:
        """Return candidates `rows` only, the same number for each caption."""
        length = self.length[rows] if isinstance(self.length, Tensor) else self.length
        return KVCache([layer.map(lambda x: x[:, rows]) for layer in self.layers], length)

    def copy(self) -> KVCache:
        """Return a deep copy."""
        buffers = (x.clone() for x in self.buffers)
        return KVCache([layer.bind(buffers) for layer in self.layers], self.length)

    @property
    def buffers(self) -> list[Tensor]:
        """All tensors of the cache."""
        return [x for layer in self.layers for x in layer.buffers]

    def attention_fns(self) -> list[AttentionFn]:
        """Return each layer's attention at the next positions."""
        return [partial(layer.append, self.length) for layer in self.layers]

    def advance(self, positions: int) -> None:
        """Count more positions as read."""
        self.length = self.length + positions

    @property
    def bytes_per_candidate(self) -> int:
        """Bytes that one more candidate takes."""
        return sum(x.keys.bytes_per_candidate + x.values.bytes_per_candidate for x in self.layers)


class RaggedBatch:
    """Caches at different positions that share a step. Their rows form one batch, cache after cache; attention is
    computed per cache."""

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self.caches = caches
        self.sizes = [cache.layers[0].keys.parts[0].shape[1] for cache in caches]
        device = caches[0].layers[0].prefix_keys.device
        lengths = [torch.as_tensor(cache.length, device=device) for cache in caches]
        self.length = torch.cat([x.expand(n, 1) for x, n in zip(lengths, self.sizes, strict=True)])  # [M, 1]

    def attention_fns(self) -> list[AttentionFn]:
        return [partial(self._attend_each, fns) for fns in zip(*(x.attention_fns() for x in self.caches), strict=True)]

    def _attend_each(self, attention_fns: Sequence[AttentionFn], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(attention_fns, *(x.split(self.sizes) for x in (q, k, v)), strict=True)
        return torch.cat([attention_fn(*part) for attention_fn, *part in parts])

    def advance(self, positions: int) -> None:
        for cache in self.caches:
            cache.advance(positions)
