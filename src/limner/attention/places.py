"""Rows of a decoding cache arranged by captions, so that one product serves all rows of a caption.

Shapes: B captions, N rows of each (at most, if they differ), M rows, H heads, W positions, K any width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

__all__ = ["Places", "group", "ungroup"]


_MAX_TABLE_ROWS = 2  # rows of the table for each row of a cache; else captions with many rows take several entries


class Places(NamedTuple):
    """Places of M rows in a table of B entries and N rows of each, some of them empty: index [M] into B * N.

    `captions` are those of the entries, [B]; None if the entries are the captions.
    """

    index: Int64[Tensor, " M"]
    n: int
    captions: Int64[Tensor, " B"] | None

    @classmethod
    def of(cls, captions: Sequence[int], b: int, device: torch.device) -> Places | None:
        """Return the places of rows, given the caption of each of them, or None if the table in order is the rows."""
        counts, ranks = Counter[int](), []
        for caption in captions:
            ranks.append(counts[caption])
            counts[caption] += 1
        n, entries = max(counts.values()), {(caption, 0): caption for caption in range(b)}
        if n * b > _MAX_TABLE_ROWS * len(captions):
            n = -(-len(captions) // b)
        index = []
        for caption, rank in zip(captions, ranks, strict=True):
            index.append(entries.setdefault((caption, rank // n), len(entries)) * n + rank % n)
        if index == list(range(n * b)):
            return None
        of_entries = torch.tensor([caption for caption, _ in entries], device=device) if len(entries) > b else None
        return cls(torch.tensor(index, device=device), n, of_entries)

    def times(self, w: int) -> Places:
        """Return the places of M * W rows, W for each row here."""
        index = (self.index[:, None] * w + torch.arange(w, device=self.index.device)).flatten()
        return self._replace(index=index, n=self.n * w)


def group(x: Float[Tensor, "M H W K"], b: int, places: Places | None) -> Float[Tensor, "B H N*W K"]:
    """Arrange rows by captions, so that one product serves all rows of a caption."""
    if places:
        x = x.new_zeros(b * places.n, *x.shape[1:]).index_copy_(0, places.index, x)
    return x.unflatten(0, (b, -1)).transpose(1, 2).flatten(2, 3)


def ungroup(x: Float[Tensor, "B H N*W K"], w: int, places: Places | None) -> Float[Tensor, "M H W K"]:
    """Return the rows of an arrangement of `group`."""
    rows = x.unflatten(2, (-1, w)).transpose(1, 2).flatten(0, 1)
    return rows[places.index] if places else rows
