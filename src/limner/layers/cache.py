"""Decoding: keys and values of what each layer's pattern can still see, and no more.

The prefix is the same for all candidates of a caption: its keys and values are stored once and read
once a step. Of the image, a candidate holds

    row     a ring of w + 1 positions
    conv    a ring of (k // 2) (w + 1) + 1 positions, of which a mask hides those outside the window
    column  the grid, by columns, of which a step reads its own column so far
    dense   the grid

At the paper's size (64 layers, 32 x 32 tokens) that is 283 positions a layer on average, where a dense
cache holds 1,280 and the text again for each candidate.

Shapes: B captions, N candidates of each, M = B * N, H heads, P prefix, C head width, n positions held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from limner.layers.attention import Kind, offsets


def held(kind: Kind, grid: tuple[int, int], kernel: int = 11) -> int:
    """Image positions that a layer's cache holds for each candidate."""
    if kind in ("row", "conv"):
        return min(int(offsets(kind, grid, kernel).max()) + 1, grid[0] * grid[1])
    return grid[0] * grid[1]


@dataclass
class LayerCache:
    """One layer's keys and values: prefix [B, H, P, C], image [M, H, n, C]."""

    kind: Kind
    grid: tuple[int, int]
    kernel: int
    prefix_keys: Tensor
    prefix_values: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, kind: Kind, grid: tuple[int, int], kernel: int, keys: Tensor, values: Tensor) -> LayerCache:
        """After the prefix was read, whose keys and values [B, H, P, C] these are; one candidate each."""
        b, heads, _, c = keys.shape
        empty = keys.new_zeros(b, heads, held(kind, grid, kernel), c)
        return cls(kind, grid, kernel, keys, values, empty, empty.clone())

    def expand(self, n: int) -> LayerCache:
        """`n` candidates of each caption that go on from here: B -> B * n; the prefix stays shared."""
        return replace(self, keys=self.keys.repeat_interleave(n, 0), values=self.values.repeat_interleave(n, 0))

    def attend(self, position: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the keys and values of an image position and attend from it: [M, H, 1, C] each."""
        slot = self._slot(position)
        self.keys[:, :, slot], self.values[:, :, slot] = k[:, :, 0], v[:, :, 0]
        slots = self._slots(position)
        keys, values = self.keys[:, :, slots], self.values[:, :, slots]
        b, heads, p, c = self.prefix_keys.shape
        q = q * c**-0.5
        shared = q.view(b, -1, heads, c).transpose(1, 2)  # [B, H, N, C]: one product for all candidates
        by_prefix = (shared @ self.prefix_keys.transpose(2, 3)).transpose(1, 2).reshape(len(q), heads, 1, p)
        by_image = q @ keys.transpose(2, 3)
        if self.kind == "conv":  # to read all of the ring costs less than to gather the window
            back = (position - torch.arange(slots.stop, device=q.device)) % self.keys.shape[2]
            by_image = by_image + _outside(self.grid, self.kernel, q.device, q.dtype)[back]
        weights = torch.cat([by_prefix, by_image], -1).softmax(-1)  # accumulates in fp32 whatever the format
        of_prefix = weights[..., :p].view(b, -1, heads, p).transpose(1, 2) @ self.prefix_values
        return of_prefix.transpose(1, 2).reshape(q.shape) + weights[..., p:] @ values

    def _slot(self, position: int) -> int:
        h, w = self.grid
        if self.kind == "column":
            return position % w * h + position // w
        return position % self.keys.shape[2]

    def _slots(self, position: int) -> slice:
        """Where what `position` sees of the image is stored, itself among it."""
        if self.kind == "column":
            first = position % self.grid[1] * self.grid[0]
            return slice(first, first + position // self.grid[1] + 1)
        return slice(min(position + 1, self.keys.shape[2]))  # a ring has no order, and a softmax needs none


@lru_cache(maxsize=16)
def _outside(grid: tuple[int, int], kernel: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """-inf for the positions of the convolution's ring that are outside its window, else 0: [steps back]."""
    with torch.inference_mode(False):
        hidden = torch.ones(held("conv", grid, kernel), dtype=torch.bool)
        hidden[[back for back in offsets("conv", grid, kernel).tolist() if back < len(hidden)]] = False
        return torch.zeros(len(hidden)).masked_fill_(hidden, -torch.inf).to(device, dtype)


@dataclass
class Cache:
    """All layers' caches; `length` image positions have been read."""

    layers: Sequence[LayerCache]
    length: int = 0

    def expand(self, n: int) -> Cache:
        """`n` candidates of each caption, which go on from here."""
        return Cache([layer.expand(n) for layer in self.layers], self.length)

    @property
    def bytes_per_candidate(self) -> int:
        """Memory that one more candidate takes."""
        layers = self.layers
        return sum(2 * x.keys[0].numel() * x.keys.element_size() for x in layers)
