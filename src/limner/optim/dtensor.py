"""Operations on tensors that may be sharded over processes (torch's `DTensor`). Ordinary tensors pass unchanged.

Shapes are those of the full tensor. `DTensor` is imported only where one is created, since the import takes time that a
single process does not need to spend.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from limner import compat

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(x: Tensor) -> TypeGuard[DTensor]:
    """Return True for a `DTensor`, without importing `torch.distributed.tensor`."""
    return hasattr(x, "full_tensor")


def full_tensor(x: Tensor) -> Tensor:
    """All values of a tensor, gathered on every process. Collective: all processes must call it."""
    return x.full_tensor() if is_dtensor(x) else x


def to_local(x: Tensor) -> Tensor:
    """Shard of a tensor on this process, possibly empty."""
    return x.to_local() if is_dtensor(x) else x


def shard_like(x: Tensor, reference: Tensor) -> Tensor:
    """Shard a full tensor, equal on every process, as `reference` is sharded. A `DTensor` passes unchanged."""
    if not is_dtensor(reference) or is_dtensor(x):
        return x
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x, reference.device_mesh, reference.placements, src_data_rank=None)


def from_local(x: Tensor, reference: Tensor) -> Tensor:
    """Build a tensor with the shape and sharding of `reference` from its local shard: the inverse of `to_local`."""
    if not is_dtensor(reference):
        return x
    from torch.distributed.tensor import DTensor

    size = {"shape": reference.shape, "stride": reference.stride()}
    return DTensor.from_local(x, reference.device_mesh, reference.placements, run_check=False, **size)


def shard_dim(shape: Sequence[int], shards: int) -> int:
    """Dimension along which a parameter is sharded: the longer side of a matrix if that divides evenly, else the first.

    PowerSGD sends factors as long as the two sides of each shard (Ramesh et al. 2021, App. E.1). Cutting the longer
    side keeps the sum of both sides small.
    """
    return int(len(shape) == 2 and shape[1] > shape[0] and shape[1] % shards == 0)


def sum_over_shards(parts: Sequence[Tensor], tensors: list[Tensor]) -> Tensor:
    """Sum local results, [] for each of n tensors, over the shards of these tensors: [n]."""
    sums = torch.stack(list(parts))
    if tensors and is_dtensor(sharded := tensors[0]):
        from torch import distributed

        for dimension, placement in enumerate(sharded.placements):
            if placement.is_shard():
                distributed.all_reduce(sums, group=sharded.device_mesh.get_group(dimension))
    return sums


def mean_over_shards(parts: list[Tensor], tensors: list[Tensor]) -> Tensor:
    """Mean over all values of each of n tensors, [n], from local sums, [] each."""
    return sum_over_shards(compat.foreach_div(parts, [float(x.numel()) for x in tensors]), tensors)


def split_by_placement(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Split tensors into ordinary ones and `DTensor`s, which torch's multi-tensor operations cannot mix."""
    tensors = list(tensors)
    kinds = [[x for x in tensors if is_dtensor(x) == sharded] for sharded in (False, True)]
    return [kind for kind in kinds if kind]
