"""A decoding cache: the keys and values that later positions can still see under each layer's pattern.

All candidates of a caption share the prefix, whose keys and values are stored once and read once per step. For the
image, a candidate holds

    row     a ring of w + 1 positions
    conv    a ring of (k // 2) (w + 1) + 1 positions, of which a mask hides those outside the window
    column  a ring of h positions for each column, of which a step reads one
    dense   a ring of all S

as `patterns.py` defines. A step reads the written slots of its line's ring, and a mask hides the pattern's holes.
At the paper's size (64 layers, 32 x 32 tokens) a candidate holds 283 positions per layer on average. A dense cache
holds 1,280, with a copy of the text for each candidate. A candidate's states are stored in the model's format, or as
int8 with a scale for each position and head.

A position is an integer or a tensor [1]. With a tensor, every step runs the same operations on the same memory, so
that a CUDA graph can replay it (`sampling/cuda_graph.py`). The trade-off: a step reads the whole ring and masks
unwritten slots. On a GPU one kernel does the whole step (`triton_decode.py`).

Shapes: B captions, N candidates of each, M = B * N, H heads, P prefix, C head width; n positions held, L lines (the
columns of a pattern that sees only its own column, else 1), of which a step reads one; K rows kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from limner.layers.attention import Core
from limner.layers.patterns import Pattern
from limner.numerics.compile_elementwise import triton_launches

Position = int | Tensor  # a tensor is int64 [1]

_PART = 4  # once a quarter of a line is written, a step reads the whole line under a mask: a product copies slices


class Store:
    """Keys or values of candidates, [L, M, H, n / L, C], in the model's format. A line is contiguous."""

    def __init__(self, like: Tensor, lines: int, n: int) -> None:
        """Allocate for the candidates, heads, width and format of `like` [M, H, ..., C]."""
        self.parts: list[Tensor] = [like.new_zeros(lines, *like.shape[:2], n // lines, like.shape[-1])]

    def write(self, line: Position, slot: Position, x: Float[Tensor, "M H C"]) -> None:
        """Store the states of one position of each candidate."""
        self.parts[0][line, :, :, slot] = x

    def read(self, line: Position, slots: slice) -> Float[Tensor, "M H slots C"]:
        """Return the states in `slots` of a line."""
        return _line(self.parts[0], line)[:, :, slots]

    def expand(self, n: int) -> Store:
        """Repeat each candidate `n` times."""
        return self._with([part.repeat_interleave(n, 1) for part in self.parts])

    def keep(self, rows: Int64[Tensor, " K"]) -> Store:
        """Return the candidates `rows` only."""
        return self._with([part[:, rows] for part in self.parts])

    def at(self, memory: Iterator[Tensor]) -> Store:
        """Return a store backed by the next tensors of `memory`, which hold the same states."""
        return self._with([next(memory) for _ in self.parts])

    def _with(self, parts: list[Tensor]) -> Store:
        twin = copy(self)
        twin.parts = parts
        return twin

    @property
    def bytes_per_candidate(self) -> int:
        return sum(part[:, 0].numel() * part.element_size() for part in self.parts)


class Int8Store(Store):
    """A store in int8, with a scale absmax / 127 for each position and head."""

    def __init__(self, like: Tensor, lines: int, n: int) -> None:
        super().__init__(like, lines, n)
        values = self.parts[0]
        self.parts = [values.to(torch.int8), values.new_ones(*values.shape[:-1], 1)]

    def write(self, line: Position, slot: Position, x: Float[Tensor, "M H C"]) -> None:
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-6) / 127
        self.parts[0][line, :, :, slot] = (x / scale).round().clamp(-127, 127).to(torch.int8)
        self.parts[1][line, :, :, slot] = scale

    def read(self, line: Position, slots: slice) -> Float[Tensor, "M H slots C"]:
        values, scale = (_line(part, line)[:, :, slots] for part in self.parts)
        return values * scale


def _line(part: Tensor, line: Position) -> Tensor:
    """Return a line of a part, [M, H, n / L, C]; a copy if `line` is a tensor and the part has several lines."""
    return part[0] if len(part) == 1 else part[line].view(part.shape[1:])


@dataclass
class LayerCache:
    """Keys and values of one layer: prefix [B, H, P, C] and image.

    `hole_bias` [n / L], by steps back in a line, is -inf at the pattern's holes (positions held but not seen), else 0.
    """

    lines: int
    holes: bool
    hole_bias: Tensor
    prefix_keys: Tensor
    prefix_values: Tensor
    keys: Store
    values: Store

    @classmethod
    def of(
        cls,
        pattern: Pattern,
        keys: Float[Tensor, "B H P C"],
        values: Float[Tensor, "B H P C"],
        store: type[Store] = Store,
    ) -> LayerCache:
        """Return the cache after the prefix, given its keys and values, with one candidate per caption."""
        empty = (store(x, pattern.lines, pattern.held) for x in (keys, values))
        hole_bias = _hole_bias(pattern, keys.device, keys.dtype)
        return cls(pattern.lines, pattern.holes, hole_bias, keys, values, *empty)

    def expand(self, n: int) -> LayerCache:
        """Repeat each caption's candidates `n` times, M -> M * n; the prefix stays shared."""
        return replace(self, keys=self.keys.expand(n), values=self.values.expand(n))

    def keep(self, rows: Int64[Tensor, " K"]) -> LayerCache:
        """Return candidates `rows` only, the same number for each caption."""
        return replace(self, keys=self.keys.keep(rows), values=self.values.keep(rows))

    @property
    def memory(self) -> list[Tensor]:
        """All tensors of the cache."""
        return [self.prefix_keys, self.prefix_values, *self.keys.parts, *self.values.parts]

    def at(self, memory: Iterator[Tensor]) -> LayerCache:
        """Return a cache backed by the next tensors of an iterator, in the order of the property `memory`."""
        prefix = {"prefix_keys": next(memory), "prefix_values": next(memory)}
        return replace(self, **prefix, keys=self.keys.at(memory), values=self.values.at(memory))

    def append(
        self,
        position: Position,
        q: Float[Tensor, "M H 1 C"],
        k: Float[Tensor, "M H 1 C"],
        v: Float[Tensor, "M H 1 C"],
    ) -> Float[Tensor, "M H 1 C"]:
        """Store the key and value of an image position and return the attention output at that position."""
        if isinstance(position, Tensor) and self._one_kernel(q, k, v):
            from limner.layers import triton_decode

            rings = self.keys.parts[0], self.values.parts[0]
            prefix = self.prefix_keys, self.prefix_values
            return triton_decode.attend(position, q, k, v, prefix, rings, self.hole_bias)
        line, step = position % self.lines, position // self.lines
        slots = self._slots(step)
        self.keys.write(line, step % len(self.hole_bias), k[:, :, 0])
        self.values.write(line, step % len(self.hole_bias), v[:, :, 0])
        keys, values = self.keys.read(line, slots), self.values.read(line, slots)
        b, heads, p, c = self.prefix_keys.shape
        q = q * c**-0.5
        shared = q.view(b, -1, heads, c).transpose(1, 2)  # [B, H, N, C]: one product for all candidates
        by_prefix = (shared @ self.prefix_keys.transpose(2, 3)).transpose(1, 2).reshape(len(q), heads, 1, p)
        by_image = q @ keys.transpose(2, 3)
        if (bias := self._bias(step, slots)) is not None:
            by_image = by_image + bias
        weights = torch.cat([by_prefix, by_image], -1).softmax(-1)  # accumulates in fp32 for every format
        of_prefix = weights[..., :p].view(b, -1, heads, p).transpose(1, 2) @ self.prefix_values
        return of_prefix.transpose(1, 2).reshape(q.shape) + weights[..., p:] @ values

    def _one_kernel(self, *states: Tensor) -> bool:
        """Return True if `triton_decode.py` attends: on a GPU, in the model's format, outside `torch.compile`."""
        if not triton_launches(states[0]) or type(self.keys) is not Store:
            return False
        from limner.layers import triton_decode

        return triton_decode.takes(*states, self.prefix_keys, self.prefix_values, self.keys.parts[0])

    def _slots(self, step: Position) -> slice:
        """Return the slots to read for the `step`-th position of a line."""
        ring = len(self.hole_bias)
        there = ring if isinstance(step, Tensor) else min(step + 1, ring)
        return slice(ring if there > ring // _PART else there)

    def _bias(self, step: Position, slots: slice) -> Tensor | None:
        """Return -inf for slots that the position must not see, else 0; None if it sees all slots."""
        ahead = isinstance(step, Tensor) or slots.stop > step + 1  # the slice has unwritten slots
        if not ahead and not self.holes:
            return None
        back = (step - torch.arange(slots.stop, device=self.hole_bias.device)) % len(self.hole_bias)
        bias = self.hole_bias[back]
        return bias.masked_fill_(back > step, -torch.inf) if ahead else bias


@lru_cache(maxsize=16)
def _hole_bias(pattern: Pattern, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return -inf for the steps back in a line that the pattern does not see, else 0: [n / L]."""
    with torch.inference_mode(False):
        seen = pattern.sees(pattern.lines * torch.arange(pattern.ring, device="cpu"))
        return torch.zeros(pattern.ring, device="cpu").masked_fill_(~seen, -torch.inf).to(device, dtype)


@dataclass
class Cache:
    """The caches of all layers, with `length` image positions read."""

    layers: Sequence[LayerCache]
    length: Position = 0

    def expand(self, n: int) -> Cache:
        """Repeat each caption's candidates `n` times, M -> M * n."""
        return Cache([layer.expand(n) for layer in self.layers], self.length)

    def keep(self, rows: Int64[Tensor, " K"]) -> Cache:
        """Return candidates `rows` only, the same number for each caption."""
        return Cache([layer.keep(rows) for layer in self.layers], self.length)

    def copy(self) -> Cache:
        """Return a deep copy."""
        memory = (x.clone() for x in self.memory)
        return Cache([layer.at(memory) for layer in self.layers], self.length)

    @property
    def memory(self) -> list[Tensor]:
        """All tensors of the cache."""
        return [x for layer in self.layers for x in layer.memory]

    def cores(self) -> list[Core]:
        """Return each layer's attention at the next position."""
        return [partial(layer.append, self.length) for layer in self.layers]

    def advance(self) -> None:
        """Count one more position as read."""
        self.length += 1

    @property
    def rows(self) -> int:
        return self.layers[0].keys.parts[0].shape[1]

    @property
    def bytes_per_candidate(self) -> int:
        """Bytes that one more candidate takes."""
        return sum(x.keys.bytes_per_candidate + x.values.bytes_per_candidate for x in self.layers)


class Together:
    """Caches at different positions that share a step. Their rows form one batch, cache after cache; attention is
    computed per cache."""

    def __init__(self, caches: Sequence[Cache]) -> None:
        self.caches = caches
        self.sizes = [cache.rows for cache in caches]
        at = torch.tensor([cache.length for cache in caches]).repeat_interleave(torch.tensor(self.sizes))
        self.length = at[:, None].to(caches[0].layers[0].prefix_keys.device)  # [M, 1]

    def cores(self) -> list[Core]:
        return [partial(self._apart, cores) for cores in zip(*(cache.cores() for cache in self.caches), strict=True)]

    def _apart(self, cores: Sequence[Core], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(cores, *(x.split(self.sizes) for x in (q, k, v)), strict=True)
        return torch.cat([core(*part) for core, *part in parts])

    def advance(self) -> None:
        for cache in self.caches:
            cache.advance()
