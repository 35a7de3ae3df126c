"""Data-parallel training: every process holds all weights; gradients are averaged during backward (Li et al. 2020).

This is the simplest strategy for models that fit on one device. DistributedDataParallel broadcasts the first process's
weights, collects gradients in buckets and averages each bucket when it is full. A `GradientReducer` replaces it
to compress gradients (`gradient_reducers.py`).

Shapes: n rows of a process, N rows of all processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from limner.distributed.gradient_reducers import GradientReducer, Reduction, Replicas, buckets
from limner.distributed.sharded_checkpoint import Folder, Shards
from limner.errors import UserError
from limner.models.dvae import DVAE
from limner.optim.dtensor import to_local
from limner.optim.grad_access import unscale_all

Make = Callable[[], GradientReducer]


class Replicated:
    """The strategy of a process of the default process group; see `Parallel`.

    Args:
        make: constructor of a gradient reducer for each trained model; None takes DistributedDataParallel.
    """

    def __init__(self, make: Make | None = None) -> None:
        self._make = make
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        self.is_main = self.rank == 0
        self.device = torch.device("cuda" if distributed.get_backend() == "nccl" else "cpu")
        self._reduction: Reduction | None = None
        self._scales: dict[Tensor, Tensor | None] = {}
        self._wrapped: DistributedDataParallel | None = None

    @contextmanager
    def first(self) -> Iterator[None]:
        """See `Parallel`."""
        group = self._patient  # `new_group` must be called by all ranks
        if not self.is_main:
            distributed.barrier(group)
        yield
        if self.is_main:
            distributed.barrier(group)

    @cached_property
    def _patient(self) -> Any:
        """A group of all processes with a timeout of a year, for tasks such as encoding a data set. It still fails
        immediately if another process has ended."""
        return distributed.new_group(backend="gloo", timeout=timedelta(days=365))

    def checkpointer(self, files: Folder) -> Shards:
        """See `Parallel`."""
        return Shards(files, self.world, self.rank)

    def divide(self, stream: Any) -> None:
        """See `Parallel`."""
        stream.shard(self.rank, self.world)

    def building(self) -> AbstractContextManager[object]:
        """See `Parallel`."""
        return nullcontext()

    def prepare(self, trainable: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """See `Parallel`."""
        self._scales = {}
        trainable.to(device)
        if self._make:
            for p in trainable.parameters():
                self._alike(p.detach(), distributed.group.WORLD)
            return self._reduced(trainable, distributed.group.WORLD, self._make)
        freezes = isinstance(trainable.model, DVAE)  # its encoder may be frozen, and then gets no gradients
        self._wrapped = DistributedDataParallel(trainable, find_unused_parameters=freezes)
        return self._wrapped

    def _alike(self, values: Tensor, group: Any) -> None:
        """Broadcast the values of a group's first process, in place."""
        there = values.to(self.device)
        distributed.broadcast(there, group=group, group_src=0)
        values.copy_(there)

    def _reduced(self, trainable: nn.Module, group: Any, make: Make) -> nn.Module:
        """Average the gradients over a group by a reducer."""
        self._reduction = Reduction(make(), buckets(trainable.model), Replicas(group), self._scales)  # type: ignore[arg-type]
        return trainable

    def describe(self) -> str:
        """See `Parallel`."""
        return self._reduction.reducer.describe() if self._reduction else ""

    def part(self, last: bool) -> AbstractContextManager[object]:
        """See `Parallel`."""
        if self._reduction:
            self._reduction.last = last
        return nullcontext() if last or self._wrapped is None else self._wrapped.no_sync()

    def gathered(self) -> AbstractContextManager[object]:
        """See `Parallel`."""
        return nullcontext()

    def unscale(self, parameters: Iterable[nn.Parameter], scale: Tensor | None) -> None:
        """See `Parallel`."""
        self._scales |= dict.fromkeys(parameters, scale)

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        """Finish the reduction, which the backward pass has begun."""
        if self._reduction:
            self._reduction.complete()
        else:
            unscale_all(self._scales)

    def put_back(self, parameters: Iterable[nn.Parameter]) -> None:
        """See `Parallel`."""
        if self._reduction:
            self._reduction.reducer.put_back(parameters)

    def check(self, parameters: Iterable[nn.Parameter]) -> None:
        """See `Parallel`."""
        self._check(parameters, distributed.group.WORLD)

    def _check(self, parameters: Iterable[nn.Parameter], group: Any) -> None:
        """Run `check` within a group whose processes must have the same weights, by comparing hashes."""
        parts = [to_local(p.detach()) for p in parameters]
        hashes = [torch.hash_tensor(x) if x.numel() else x.new_zeros((), dtype=torch.uint64) for x in parts]
        own = torch.stack(hashes).view(torch.int64)
        found = [torch.empty_like(own) for _ in range(group.size())]
        distributed.all_gather(found, own, group=group)
        differ = [i for i, other in enumerate(found) if not torch.equal(other, found[0])]
        if self.any(bool(differ)):
            ranks = [distributed.get_global_rank(group, i) for i in differ] or "others"
            raise UserError(
                f"the weights of process {distributed.get_global_rank(group, 0)} and of {ranks} differ, which must be "
                "the same: nothing is saved any more; start again from the last checkpoint"
            )

    def tensors(self) -> dict[str, Tensor]:
        """See `Parallel`."""
        return self._reduction.tensors() if self._reduction else {}

    def errors(self) -> dict[str, Tensor]:
        """See `Parallel`."""
        return self._reduction.errors() if self._reduction else {}

    def load(self, tensors: Mapping[str, Tensor], errors: Iterable[Mapping[str, Tensor]] = ()) -> None:
        """See `Parallel`."""
        if self._reduction:
            self._reduction.load(tensors, errors)

    def join(self, values: Shaped[Tensor, "n ..."]) -> Shaped[Tensor, "N ..."]:
        """See `Parallel`."""
        return _Joined.apply(values, self)  # type: ignore[no-any-return]

    def mean(self, values: Tensor) -> Tensor:
        """See `Parallel`."""
        return self.sum(values) / self.world

    def sum(self, values: Tensor) -> Tensor:
        """Return the elementwise sum over ranks. For NCCL values on the CPU are copied to the GPU."""
        there = values.to(self.device, copy=True, memory_format=torch.contiguous_format)
        distributed.all_reduce(there)
        return there.to(values.device)

    def any(self, flag: bool) -> bool:
        """See `Parallel`."""
        found = torch.tensor(int(flag), device=self.device)
        distributed.all_reduce(found, distributed.ReduceOp.MAX)
        return bool(found)

    def gather(self, values: Tensor) -> list[Tensor]:
        """See `Parallel`."""
        there = values.to(self.device).contiguous()
        found = [torch.empty_like(there) for _ in range(self.world)]
        distributed.all_gather(found, there)
        return [value.to(values.device) for value in found]


class _Joined(torch.autograd.Function):
    """Concatenate the rows of all processes; the gradient of a row is summed over processes."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: Replicated) -> Tensor:
        ctx.ranks, ctx.rows = ranks, len(values)
        return torch.cat(ranks.gather(values))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.sum(upstream[0])[ctx.ranks.rank * ctx.rows :][: ctx.rows], None
