"""An endless, resumable stream of batches whose order depends only on the seed.

Number the samples that a run consumes 0, 1, 2, ... Sample `k` belongs to epoch `k // n` of a data set of `n`. The pair
(seed, epoch) determines the order of the elements. A hash of (seed, k) seeds all randomness of the sample (crop,
phrasing, BPE dropout). Batch size, number of ranks and threads have no effect. Hence

- the position suffices to resume (the state also holds the data set's size, to detect changed data);
- `world` ranks only divide each batch (`Stream.shard`): rank r takes the r-th slice, and the slices together
  are the batch of a single rank;
- the order is a sort by hash, which cannot change between library versions as a shuffle can.
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
from limner.numerics.seeding import splitmix64

__all__ = ["Dataset", "Stream", "per_rank_batch_size", "permutation"]


class Dataset(Protocol):
    """Random access to training batches."""

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray, seeds: np.ndarray) -> dict[str, Tensor]:
        """Return the samples `indices` (int64 [B]). Sample b draws all randomness from seeds[b]
        (uint64 [B]), so it does not depend on its batch. If other samples replace bad ones, "index"
        (int64 [B]) holds the indices of the samples returned."""
        ...


def per_rank_batch_size(batch: int, world: int, setting: str = "") -> int:
    """Return the samples of a batch per rank. Raises `UserError`, which names `setting` if given, if `world` does not
    divide `batch`."""
    if batch % world:
        multiple = f"a multiple of {world}" + (f" for {setting}" if setting else "")
        raise UserError(f"a batch of {batch} cannot be divided among {world} ranks: choose {multiple}")
    return batch // world


@lru_cache(maxsize=4)
def permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of `n` elements in an epoch, int64 [n], by ascending hash."""
    order = np.argsort(splitmix64(seed, epoch, np.arange(n)), kind="stable")
    order.setflags(write=False)  # callers share it through the cache
    return order


class Stream:
    """An endless iterator over batches of `batch_size` samples; "index" holds each row's element of the data set.

    With `prefetch > 0` a thread prepares that many batches ahead; `position` and `state_dict` count only consumed
    samples. Raises `UserError` if the data set is empty.
    """

    def __init__(self, dataset: Dataset, batch_size: int, seed: int = 0, prefetch: int = 0) -> None:
        if len(dataset) == 0:
            raise UserError("the data set is empty: give it samples")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        self.dataset, self.batch_size, self.seed, self.prefetch = dataset, batch_size, seed, prefetch
        self.rank, self.world = 0, 1
        self.position = 0  # samples consumed, over all ranks
        self._prefetched: deque[Future[dict[str, Tensor]]] = deque()
        self._thread: ThreadPoolExecutor | None = None

    def shard(self, rank: int, world: int) -> None:
        """Restrict the stream to rank `rank` of `world`: `batch_size / world` samples of each batch."""
        per_rank_batch_size(self.batch_size, world)
        self._cancel_prefetched()
        self.rank, self.world = rank, world

    def batch_indices(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices and seeds of this rank's share of the batch at `position`."""
        n, size = len(self.dataset), self.batch_size // self.world
        k = position + self.rank * size + np.arange(size)
        epochs, offsets = np.divmod(k, n)
        indices = np.empty_like(k)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            indices[in_epoch] = permutation(n, self.seed, int(epoch))[offsets[in_epoch]]
        return indices, splitmix64(self.seed, 1 << 63, k)

    def _load(self, position: int) -> dict[str, Tensor]:
        indices, seeds = self.batch_indices(position)
        return {"index": torch.from_numpy(indices), **self.dataset.batch(indices, seeds)}

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self

    def __next__(self) -> dict[str, Tensor]:
        if self.prefetch:
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="stream")
            while len(self._prefetched) <= self.prefetch:
                position = self.position + len(self._prefetched) * self.batch_size
                self._prefetched.append(self._thread.submit(self._load, position))
            batch = self._prefetched.popleft().result()
        else:
            batch = self._load(self.position)
        self.position += self.batch_size
        return batch

    def state_dict(self) -> dict[str, int]:
        """Return the position and the size of the data set; the config holds the seed."""
        return {"position": self.position, "samples": len(self.dataset)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume from `state`; warn if the size of the data set has changed."""
        before, now = state.get("samples"), len(self.dataset)
        if before not in (None, now):
            warnings.warn(
                f"the data has {now:,} samples, but had {before:,} at the checkpoint: training on changed data",
                stacklevel=2,
            )
        self._cancel_prefetched()
        self.position = int(state["position"])

    def close(self) -> None:
        """Stop the prefetch thread. The stream may be used again."""
        self._cancel_prefetched()
        if self._thread:
            self._thread.shutdown(wait=True)
            self._thread = None

    def _cancel_prefetched(self) -> None:
        while self._prefetched:
            self._prefetched.pop().cancel()
