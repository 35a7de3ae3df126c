"""An endless, resumable stream of batches whose order depends on the seed alone.

Number the samples that a run consumes 0, 1, 2, ... Sample `k` belongs to epoch `k // n` of a data
set of `n`; which element it is follows from (seed, epoch), and all its randomness (the crop, the
phrasing, BPE dropout) from its own seed, a hash of (seed, k). Nothing else enters: not the batch
size, not the number of ranks, not threads. Hence

- resuming needs one number, the position (with the data set's size, to notice that the data has changed);
- `world` ranks only divide each batch (`Stream.divide`): rank r takes the r-th slice, and the slices together
  are the batch that a single rank would have seen;
- the order is a sort by hash rather than a library's shuffle, so it cannot change with a version.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from limner.errors import UserError


class Dataset(Protocol):
    """Random access to training batches."""

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray, seeds: np.ndarray) -> dict[str, Tensor]:
        """The samples `indices` (int64 [B]); sample b draws all its randomness from seeds[b]
        (uint64 [B]), so that it is the same in whatever batch it lies. If other samples replace bad ones, "index"
        (int64 [B]) says which samples they are."""
        ...


def hash64(*values: int | np.ndarray) -> np.ndarray:
    """A uint64 hash of integers (or arrays of them, broadcast): splitmix64, chained.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    state = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):
        for value in values:
            state = state + np.asarray(value).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return np.asarray(state)


def share_of(batch: int, world: int, setting: str = "") -> int:
    """The samples of a batch for each of `world` ranks. Raises `UserError`, which may name the setting, where they
    cannot have as many each."""
    if batch % world:
        end = f" for {setting}" if setting else ""
        raise UserError(f"a batch of {batch} cannot be divided among {world} ranks: choose a multiple of {world}{end}")
    return batch // world


@lru_cache(maxsize=4)
def permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """The order of `n` elements in one epoch: int64 [n], by ascending hash."""
    order = np.argsort(hash64(seed, epoch, np.arange(n)), kind="stable")
    order.setflags(write=False)  # it is shared through the cache
    return order


class Stream:
    """Batches of `batch_size` samples, for ever; "index" says which element of the data set each row is.

    With `prefetch > 0` one thread prepares that many batches ahead; `position` and `state_dict` still count only what
    was consumed.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        seed: int = 0,
        prefetch: int = 0,
    ) -> None:
        if len(dataset) == 0:
            raise UserError("the data set is empty: there is nothing to train on")
        if batch_size < 1:
            raise ValueError(f"a batch has one sample at least, not {batch_size}")
        self.dataset, self.batch_size, self.seed, self.prefetch = dataset, batch_size, seed, prefetch
        self.rank, self.world = 0, 1
        self.position = 0  # samples consumed, over all ranks
        self._ahead: deque[Future[dict[str, Tensor]]] = deque()
        self._thread: ThreadPoolExecutor | None = None

    def divide(self, rank: int, world: int) -> None:
        """From now on yield the share of rank `rank` of `world`: `batch_size / world` samples of each batch."""
        share_of(self.batch_size, world)
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is not in [0, {world})")
        self._drop_ahead()
        self.rank, self.world = rank, world

    def plan(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """This rank's share of the batch that starts at `position`: indices and seeds."""
        n, share = len(self.dataset), self.batch_size // self.world
        k = position + self.rank * share + np.arange(share)
        epochs, offsets = np.divmod(k, n)
        indices = np.empty_like(k)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = permutation(n, self.seed, int(epoch))[offsets[here]]
        return indices, hash64(self.seed, 1 << 63, k)

    def _load(self, position: int) -> dict[str, Tensor]:
        indices, seeds = self.plan(position)
        return {"index": torch.from_numpy(indices), **self.dataset.batch(indices, seeds)}

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self

    def __next__(self) -> dict[str, Tensor]:
        if self.prefetch:
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="stream")
            while len(self._ahead) <= self.prefetch:
                ahead = self.position + len(self._ahead) * self.batch_size
                self._ahead.append(self._thread.submit(self._load, ahead))
            batch = self._ahead.popleft().result()
        else:
            batch = self._load(self.position)
        self.position += self.batch_size
        return batch

    def state_dict(self) -> dict[str, int]:
        """The position, and the size of the data set; the seed belongs to the configuration."""
        return {"position": self.position, "samples": len(self.dataset)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after the batches that were consumed when `state` was taken; with other data, warn."""
        before, now = state.get("samples"), len(self.dataset)
        if before not in (None, now):
            warnings.warn(
                f"the data has {now:,} samples and had {before:,} at the checkpoint: going on with other data",
                stacklevel=2,
            )
        self._drop_ahead()
        self.position = int(state["position"])

    def close(self) -> None:
        """Stop the prefetch thread. The stream may be used again."""
        self._drop_ahead()
        if self._thread:
            self._thread.shutdown(wait=True)
            self._thread = None

    def _drop_ahead(self) -> None:
        while self._ahead:
            self._ahead.pop().cancel()
