"""Tensors of which each process holds a shard (torch's `DTensor`), for code that also takes ordinary ones.

Shapes: those of the whole tensor, whoever holds what.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def sharded(x: Tensor) -> bool:
    """Whether processes share it. Asked of every tensor, so without importing what a run alone never needs."""
    return hasattr(x, "full_tensor")


def whole(x: Tensor) -> Tensor:
    """All of it, on every process; itself if it is not shared. All processes must ask together."""
    shared: Any = x
    return shared.full_tensor() if sharded(x) else x


def local(x: Tensor) -> Tensor:
    """This process's shard, which may be empty; itself if it is not shared."""
    shared: Any = x
    return shared.to_local() if sharded(x) else x


def like(x: Tensor, of: Tensor) -> Tensor:
    """A whole tensor, the same on every process, shared as `of` is; itself if that is not shared, or if it is shared
    already."""
    if not sharded(of) or sharded(x):
        return x
    from torch.distributed.tensor import distribute_tensor

    shared: Any = of
    return distribute_tensor(x, shared.device_mesh, shared.placements, src_data_rank=None)


def placed(x: Tensor, of: Tensor) -> Tensor:
    """This process's shard of a tensor that is shaped and shared as `of`: the inverse of `local`."""
    if not sharded(of):
        return x
    from torch.distributed.tensor import DTensor

    shared: Any = of
    return DTensor.from_local(
        x, shared.device_mesh, shared.placements, run_check=False, shape=shared.shape, stride=shared.stride()
    )


def cut(shape: Sequence[int], shards: int) -> int:
    """The dimension along which a parameter is cut: the longer side of a matrix, where shards of one size come of it,
    else the first. What PowerSGD sends of a shard are its two sides, so they must not be a whole long one and a small
    part of the short one (Ramesh et al. 2021, App. E.1)."""
    return int(len(shape) == 2 and shape[1] > shape[0] and shape[1] % shards == 0)


def total(parts: Sequence[Tensor], of: list[Tensor]) -> Tensor:
    """The sum over all shards of each tensor: [n] from this process's sums, [] each, of n tensors that are shared as
    `of`."""
    sums = torch.stack(list(parts))
    if of and sharded(of[0]):
        from torch import distributed

        shared: Any = of[0]
        for dimension, placement in enumerate(shared.placements):
            if placement.is_shard():
                distributed.all_reduce(sums, group=shared.device_mesh.get_group(dimension))
    return sums


def mean(parts: list[Tensor], of: list[Tensor]) -> Tensor:
    """The mean over all shards of each tensor: [n] from the sums over this process's shards of n tensors shaped and
    shared as `of`."""
    return total(torch._foreach_div(parts, [float(x.numel()) for x in of]), of)  # numbers that no device waits for


def by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Those that are shared and those that are not, which no operation takes in one list."""
    tensors = list(tensors)
    kinds = [[x for x in tensors if sharded(x) == shared] for shared in (False, True)]
    return [kind for kind in kinds if kind] or [[]]
