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
slot of a later position counts as one too far back to be visible, and the next step overwrites it. Rows of any
captions and positions may share a step (`KVCache.put`).

Shapes: B captions, N candidates of each (at most, if they differ), M rows, H heads, P prefix, C head width; n positions
held, L lanes (the columns of a pattern that sees only its own column, else 1), of which a position reads one; W
positions; K rows kept.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from limner.attention.attention import AttentionFn
from limner.attention.kv_store import KVStore, Position
from limner.attention.patterns import Pattern
from limner.attention.places import Places, group, ungroup
from limner.numerics.compile_elementwise import can_launch_triton

# A step that reads more than this part of a lane reads the whole lane under a mask, since a product copies slices.
_FULL_READ_FRACTION = 1 / 4


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

    @property
    def buffers(self) -> list[Tensor]:
        """All tensors of the cache."""
        return [self.prefix_keys, self.prefix_values, *self.keys.parts, *self.values.parts]

    def bind(self, buffers: Iterator[Tensor]) -> LayerKVCache:
        """Return a cache backed by the next tensors of an iterator, in the order of the property `buffers`."""
        prefix = {"prefix_keys": next(buffers), "prefix_values": next(buffers)}
        return replace(self, **prefix, keys=self.keys.bind(buffers), values=self.values.bind(buffers))

    def append(
        self, position: Position, q: Float[Tensor, "M H W C"], k: Float[Tensor, "M H W C"],
        v: Float[Tensor, "M H W C"], places: Places | None = None,
    ) -> Float[Tensor, "M H W C"]:  # fmt: skip
        """Store the keys and values of W image positions from `position`, and return the attention output at them.

        Several positions need a position for each row, [M, 1]. `places` are those of `KVCache`.
        """
        if isinstance(position, Tensor) and position.ndim == 2:
            return self._append_window(position + torch.arange(q.shape[2], device=q.device), places, q, k, v)
        if isinstance(position, Tensor) and not places and self._fused(q, k, v):
            from limner.attention import triton_decode

            rings = self.keys.parts[0], self.values.parts[0]
            prefix = self.prefix_keys, self.prefix_values
            return triton_decode.attend(position, q, k, v, prefix, rings, self.gap_bias)
        lane, step = position % self.num_lanes, position // self.num_lanes
        slots = self._slots(step)
        sees_all = isinstance(step, int) and slots <= step + 1 and not self.has_gaps
        bias = None if sees_all else self._bias(step, slots)
        return self._attend(q, *self._exchange(lane, step, slots, k, v), bias, places)

    def _append_window(
        self, position: Int64[Tensor, "M W"], places: Places | None, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        lane, step = position % self.num_lanes, position // self.num_lanes
        keys, values = self._exchange(lane, step, len(self.gap_bias), k, v)
        bias = self._bias(step[..., None], len(self.gap_bias))
        if self.num_lanes == 1:
            return self._attend(q, keys, values, bias[:, None], places)
        each = q.transpose(1, 2).flatten(0, 1)[:, :, None]  # as M * W rows, since each position has its own lane
        places = places and places.times(q.shape[2])
        output = self._attend(each, keys, values, bias.flatten(0, 1)[:, None, None], places)
        return output.view(q.shape[0], -1, *q.shape[1::2]).transpose(1, 2)

    def _exchange(self, lane: Position, step: Position, slots: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values, then return those of the lane."""
        self.keys.write(lane, step % len(self.gap_bias), k)
        self.values.write(lane, step % len(self.gap_bias), v)
        return self.keys.read(lane, slots), self.values.read(lane, slots)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, places: Places | None) -> Tensor:
        """Attend from q [M, H, W, C] to the prefix and to keys and values [M, H, slots, C]."""
        prefix_keys, prefix_values = self.prefix_keys, self.prefix_values
        if places and places.captions is not None:
            prefix_keys, prefix_values = prefix_keys[places.captions], prefix_values[places.captions]
        b, _, p, _ = prefix_keys.shape
        w, q = q.shape[2], q * q.shape[-1] ** -0.5
        prefix_scores = ungroup(group(q, b, places) @ prefix_keys.transpose(2, 3), w, places)
        image_scores = q @ keys.transpose(2, 3)
        if bias is not None:
            image_scores = image_scores + bias
        weights = torch.cat([prefix_scores, image_scores], -1).softmax(-1)  # accumulates in fp32 for every format
        from_prefix = ungroup(group(weights[..., :p], b, places) @ prefix_values, w, places)
        return from_prefix + weights[..., p:] @ values

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


@lru_cache(maxsize=16)
def _gap_bias(pattern: Pattern, ring_size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return -inf for the steps back in a lane that the pattern does not see, else 0: [ring_size]."""
    with torch.inference_mode(False):
        visible = pattern.allows(pattern.num_lanes * torch.arange(ring_size, device="cpu"))
        return torch.zeros(ring_size, device="cpu").masked_fill_(~visible, -torch.inf).to(device, dtype)


def _put(x: Tensor, y: Tensor, places: Sequence[int], dim: int) -> Tensor:
    """Write `y` into `x` at places along a dimension; those after the last one extend it."""
    inside = sum(place < x.shape[dim] for place in places)
    x.index_copy_(dim, torch.tensor(places[:inside], dtype=torch.long, device=x.device), y.narrow(dim, 0, inside))
    return torch.cat([x, y.narrow(dim, inside, len(places) - inside)], dim) if inside < len(places) else x


@dataclass
class KVCache:
    """The caches of all layers, with `length` image positions read."""

    layers: Sequence[LayerKVCache]
    length: Position = 0  # if a tensor [M, 1], of each row
    captions: Sequence[int] | None = None  # of each row; None if captions have equal numbers of rows, in order
    texts: Sequence[Hashable] = ()  # of each caption; `put` needs them
    added: Tensor | None = None  # to the embeddings of image tokens, of each caption: [B, 1, S, D]

    def __post_init__(self) -> None:
        prefix = self.layers[0].prefix_keys
        self.places = Places.of(self.captions, len(prefix), prefix.device) if self.captions else None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.layers[0].keys.parts[0].shape[1]

    @property
    def row_captions(self) -> Sequence[int]:
        """The number of each row's caption."""
        b = len(self.layers[0].prefix_keys)
        return self.captions or [i for i in range(b) for _ in range(self.rows // b)]

    def expand(self, n: int) -> KVCache:
        """Repeat each row `n` times, M -> M * n."""
        return self.select(torch.arange(self.rows).repeat_interleave(n))

    def select(self, rows: Int64[Tensor, " K"]) -> KVCache:
        """Return rows, some perhaps repeated, with the captions that they need."""
        all_captions = self.row_captions
        captions = [all_captions[row] for row in rows.tolist()]
        used = sorted(set(captions))
        rows = rows.to(self.layers[0].prefix_keys.device)
        buffers = (x[used] if x.ndim == 4 else x[:, rows] for x in self.buffers)
        length = self.length[rows] if isinstance(self.length, Tensor) else self.length
        texts = [self.texts[i] for i in used] if self.texts else ()
        layers, added = self._bind(buffers)
        return KVCache(layers, length, [used.index(x) for x in captions], texts, added)

    def put(self, cache: KVCache, slots: Sequence[int]) -> None:
        """Add rows of another cache, each at its own position: in place of the rows `slots`, then after the last row.

        A text of a row that stays is stored once. Another text takes the place of one without rows, if there is one.
        """
        captions, texts, lengths = list(self.row_captions), list(self.texts), self._row_lengths()
        rows = [*slots, *range(self.rows, self.rows + cache.rows - len(slots))]
        used = {caption for i, caption in enumerate(captions) if i not in set(slots)}
        caption_of = {texts[caption]: caption for caption in used}
        new = [i for i, text in enumerate(cache.texts) if text not in caption_of]
        unused = [i for i in range(len(texts)) if i not in used]
        places = [*unused, *range(len(texts), len(texts) + len(new))][: len(new)]
        for place, i in zip(places, new, strict=True):
            caption_of[cache.texts[i]] = place
            texts[place : place + 1] = [cache.texts[i]]
        for row, caption in zip(rows, cache.row_captions, strict=True):
            captions[row : row + 1] = [caption_of[cache.texts[caption]]]
        buffers = (
            _put(x, y[new], places, 0) if x.ndim == 4 else _put(x, y, rows, 1)
            for x, y in zip(self.buffers, cache.buffers, strict=True)
        )
        self.layers, self.added = self._bind(buffers)
        self.length, self.captions, self.texts = _put(lengths, cache._row_lengths(), rows, 0), captions, texts
        self.places = Places.of(captions, len(texts), lengths.device)

    def _row_lengths(self) -> Int64[Tensor, "M 1"]:
        return torch.as_tensor(self.length, device=self.layers[0].prefix_keys.device).expand(self.rows, 1).clone()

    def copy(self) -> KVCache:
        """Return a deep copy."""
        layers, added = self._bind(x.clone() for x in self.buffers)
        return KVCache(layers, self.length, self.captions, self.texts, added)

    def _bind(self, buffers: Iterator[Tensor]) -> tuple[list[LayerKVCache], Tensor | None]:
        """Return layers and `added` backed by the tensors of an iterator, in the order of the property `buffers`."""
        return [layer.bind(buffers) for layer in self.layers], next(buffers, None)

    @property
    def buffers(self) -> list[Tensor]:
        """All tensors of the cache."""
        return [x for layer in self.layers for x in layer.buffers] + ([] if self.added is None else [self.added])

    def added_at(self, width: int) -> Float[Tensor, "M W D"]:
        """Return what is added to the embeddings of the next tokens of each row, `width` of them."""
        assert self.added is not None
        begin = torch.as_tensor(self.length, device=self.added.device).reshape(-1, 1)
        positions = begin + torch.arange(width, device=begin.device)
        if len(self.added) == 1:
            return self.added[0, 0, positions]
        return self.added[torch.tensor(self.row_captions, device=begin.device)[:, None], 0, positions]

    def attention_fns(self) -> list[AttentionFn]:
        """Return each layer's attention at the next positions."""
        return [partial(layer.append, self.length, places=self.places) for layer in self.layers]

    def advance(self, positions: int) -> None:
        """Count more positions as read."""
        self.length = self.length + positions

    @property
    def bytes_per_candidate(self) -> int:
        """Bytes that one more candidate takes."""
        return sum(x.keys.bytes_per_candidate + x.values.bytes_per_candidate for x in self.layers)
