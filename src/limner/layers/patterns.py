"""Who sees whom among the positions of an image (Ramesh et al. 2021, §2.2, Figure 11, App. B.1).

A pattern is one set of numbers: how many raster steps back a position sees. All else follows from it, the dense
mask (`attention.py`), the blocks of training (`sparse.py`), the cache of decoding (`cache.py`) and what they
cost. So a new pattern is one function here, named in `PATTERNS`; `TransformerConfig.patterns` says which layers
have it.

Shapes: h x w grid, S = h * w positions in raster order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

Grid = tuple[int, int]


@dataclass(frozen=True)
class Pattern:
    """A pattern on an h x w grid.

    Attributes:
        offsets: how many raster steps back a position sees, rising, from itself (0) on; below S.
    """

    name: str
    grid: Grid
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, name: str, grid: Grid, offsets: Iterable[int]) -> Pattern:
        """A pattern from offsets in any order; those that lead out of the grid are dropped.

        Raises `ValueError` if a position would see a later one, or not itself.
        """
        kept = sorted({back for back in offsets if back < grid[0] * grid[1]})
        if not kept or kept[0] != 0:
            raise ValueError(f"the offsets of pattern {name!r} must begin with 0, a position itself: {kept[:4]}")
        return cls(name, grid, tuple(kept))

    @cached_property
    def by_column(self) -> bool:
        """Whether a position sees only its own column. Then a line of neighbours is a column, and otherwise the whole
        image in raster order."""
        return self.reach > 0 and all(back % self.grid[1] == 0 for back in self.offsets)

    @property
    def reach(self) -> int:
        """Raster steps back to the farthest position that is seen."""
        return self.offsets[-1]

    @property
    def lines(self) -> int:
        """Lines of neighbours that see nothing of each other."""
        return self.grid[1] if self.by_column else 1

    @property
    def ring(self) -> int:
        """Positions of a line from the farthest that is seen to the one that sees it."""
        return self.reach // self.lines + 1

    @property
    def held(self) -> int:
        """Positions whose keys and values a cache holds for each candidate."""
        return self.lines * self.ring

    @property
    def holes(self) -> bool:
        """Whether a ring holds positions that are not seen."""
        return len(self.offsets) < self.ring

    def sees(self, back: Int64[Tensor, "*places"]) -> Bool[Tensor, "*places"]:
        """Whether a position sees the one `back` raster steps before it, int64 [...] -> bool [...].

        A table, not `torch.isin`, which would sort: that takes gigabytes for the masks of long sequences. On
        the CPU whatever the default device, so that models can be built on the meta device.
        """
        table = torch.zeros(self.reach + 2, dtype=torch.bool, device="cpu")  # the last is for all others
        table[torch.tensor(self.offsets, device="cpu")] = True
        return table[torch.where((back < 0) | (back > self.reach), self.reach + 1, back)]


def row(grid: Grid, kernel: int = 11) -> Pattern:
    """Itself and the w before it in raster order, so up to the same column of the row above."""
    return Pattern.of("row", grid, range(grid[1] + 1))


def column(grid: Grid, kernel: int = 11) -> Pattern:
    """Itself and its column in the rows above."""
    return Pattern.of("column", grid, range(0, grid[0] * grid[1], grid[1]))


def conv(grid: Grid, kernel: int = 11) -> Pattern:
    """A causal k x k window around itself, in raster order (it wraps around row ends)."""
    half = kernel // 2
    window = (up * grid[1] + across for up in range(half + 1) for across in range(-half, half + 1))
    return Pattern.of("conv", grid, (back for back in window if back >= 0))


def dense(grid: Grid, kernel: int = 11) -> Pattern:
    """Itself and everything before it; not in the paper, for comparison and small grids."""
    return Pattern.of("dense", grid, range(grid[0] * grid[1]))


#: Called with a grid and `TransformerConfig.kernel`, a length for patterns whose reach the grid alone does not say.
PATTERNS: dict[str, Callable[[Grid, int], Pattern]] = {"row": row, "column": column, "conv": conv, "dense": dense}


def paper_pattern(depth: int) -> tuple[str, ...]:
    """App. B.1, layers counted from 1: the last is conv; column if (i - 2) mod 4 == 0; else row."""
    names = ["column" if (i - 2) % 4 == 0 else "row" for i in range(1, depth)]
    return (*names, "conv")
