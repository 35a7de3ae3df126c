"""Sparse attention patterns over the positions of an image (Ramesh et al. 2021, §2.2, Figure 11, App. B.1).

A pattern is a set of offsets: the raster steps back from a position to those it sees. The offsets determine the dense
mask (`attention.py`), the blocks of training (`sparse.py`), the cache of decoding (`cache.py`) and their cost. So
adding a pattern takes one function, named in `PATTERNS`. `TransformerConfig.patterns` assigns patterns to layers.

Shapes: h x w grid, S = h * w positions in raster order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

__all__ = ["PATTERNS", "Grid", "Pattern", "column", "conv", "dense", "paper_pattern", "row"]

Grid = tuple[int, int]


@dataclass(frozen=True)
class Pattern:
    """A pattern on an h x w grid.

    Attributes:
        offsets: raster steps back to the visible positions, ascending, from 0 (the position itself); below S.
    """

    name: str
    grid: Grid
    offsets: tuple[int, ...]

    @classmethod
    def from_offsets(cls, name: str, grid: Grid, offsets: Iterable[int]) -> Pattern:
        """Return a pattern from offsets in any order, without offsets beyond the grid.

        Raises `ValueError` if a position would see a later one, or not itself.
        """
        ascending = sorted({back for back in offsets if back < grid[0] * grid[1]})
        if not ascending or ascending[0] != 0:
            raise ValueError(f"the smallest offset of pattern {name!r} must be 0, the position itself: {ascending[:4]}")
        return cls(name, grid, tuple(ascending))

    @cached_property
    def by_column(self) -> bool:
        """True if a position sees only its own column. A lane is then a column, otherwise the whole image in raster
        order."""
        return self.span > 0 and all(back % self.grid[1] == 0 for back in self.offsets)

    @property
    def span(self) -> int:
        """Raster steps back to the farthest visible position."""
        return self.offsets[-1]

    @property
    def num_lanes(self) -> int:
        """Number of lanes, which do not see each other."""
        return self.grid[1] if self.by_column else 1

    def ring_size(self, window: int = 1) -> int:
        """Number of positions of a lane that a cache holds: from the farthest visible one to the current one.

        If up to `window` positions are decoded together, the first of them sees the farthest visible position when the
        last one is already stored.
        """
        spare, lane = (window - 1) // self.num_lanes, -(-self.grid[0] * self.grid[1] // self.num_lanes)
        return min(self.span // self.num_lanes + 1 + spare, lane)

    def cache_slots(self, window: int = 1) -> int:
        """Number of positions whose keys and values a cache holds for each candidate."""
        return self.num_lanes * self.ring_size(window)

    def allows(self, back: Int64[Tensor, "*places"]) -> Bool[Tensor, "*places"]:
        """Return True where a position sees the position `back` raster steps before, int64 [...] -> bool [...].

        A table replaces `torch.isin`, which sorts and takes gigabytes for the masks of long sequences. It is on the CPU
        for every default device, so that models can be built on the meta device.
        """
        table = torch.zeros(self.span + 2, dtype=torch.bool, device="cpu")  # the last entry: all other offsets
        table[torch.tensor(self.offsets, device="cpu")] = True
        return table[torch.where((back < 0) | (back > self.span), self.span + 1, back)]


def row(grid: Grid, kernel: int = 11) -> Pattern:
    """The position and the w before it in raster order, back to the same column of the row above."""
    return Pattern.from_offsets("row", grid, range(grid[1] + 1))


def column(grid: Grid, kernel: int = 11) -> Pattern:
    """The position and its column in the rows above."""
    return Pattern.from_offsets("column", grid, range(0, grid[0] * grid[1], grid[1]))


def conv(grid: Grid, kernel: int = 11) -> Pattern:
    """A causal k x k window around the position, in raster order (it wraps around row ends)."""
    half = kernel // 2
    window = (rows * grid[1] + columns for rows in range(half + 1) for columns in range(-half, half + 1))
    return Pattern.from_offsets("conv", grid, (back for back in window if back >= 0))


def dense(grid: Grid, kernel: int = 11) -> Pattern:
    """The position and all positions before it; not in the paper, for comparison and small grids."""
    return Pattern.from_offsets("dense", grid, range(grid[0] * grid[1]))


#: Functions of a grid and `TransformerConfig.kernel`, a length for patterns whose reach depends on more than the grid.
PATTERNS: dict[str, Callable[[Grid, int], Pattern]] = {"row": row, "column": column, "conv": conv, "dense": dense}


def paper_pattern(depth: int) -> tuple[str, ...]:
    """Return the patterns of App. B.1, layers counted from 1: conv if last; column if (i - 2) mod 4 == 0; else row."""
    names = ["column" if (i - 2) % 4 == 0 else "row" for i in range(1, depth)]
    return (*names, "conv")
