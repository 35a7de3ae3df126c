"""Storage of keys and values of candidates, in the model's format or in 8 bits.

Shapes: M rows, H heads, C head width; n positions held in L lanes (`cache.py`); W positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy

import torch
from jaxtyping import Float
from torch import Tensor

Position = int | Tensor  # a tensor is int64 [1], or [M, 1] with a position for each row


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

    def bind(self, buffers: Iterator[Tensor]) -> KVStore:
        """Return a store backed by the next tensors of an iterator, one for each part [L, M, H, n / L, ...]."""
        bound = copy(self)
        bound.parts = [next(buffers) for _ in self.parts]
        return bound

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
