"""Data-parallel training: every process holds all weights; gradients are averaged during backward (Li et al. 2020).

This is the simplest strategy for models that fit on one device. DistributedDataParallel broadcasts the first process's
weights, collects gradients in buckets and averages each bucket when it is full. A `Fp32Reducer` or one of its
subclasses replaces it to compress gradients (`gradient_reducers.py`).

Gradients in 16 bits are divided by a constant before they are summed, and the rest of the mean's divisor stays pending
as part of their scale: division by the number of processes in fp16 could underflow, the sum without a division could
overflow (Ramesh et al. 2021, App. D.3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property, partial
from math import log2
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from limner.distributed.gradient_reducers import Fp32Reducer, Replicas, buckets
from limner.distributed.overlapped_reducer import OverlappedReducer
from limner.distributed.powersgd import PowerSGD, PowerSGDConfig
from limner.distributed.sharded_checkpoint import ShardedCheckpointer
from limner.errors import UserError
from limner.numerics.formats import HALF_FORMATS
from limner.optim.dtensor import to_local
from limner.optim.grad_access import unscale
from limner.training.checkpoint import Checkpointer
from limner.training.parallel import Parallel, Reduction
from limner.training.train_module import Trainable

__all__ = ["ReducerFactory", "Replicated"]

ReducerFactory = Callable[[], Fp32Reducer]


class Replicated(Parallel):
    """The strategy of a process of the default process group. `replica_group` has the processes with the same weights.

    Args:
        make_reducer: constructor of a gradient reducer for each trained model; None takes PowerSGD of
            `grad_compression_rank`, or DistributedDataParallel without a rank.
    """

    def __init__(self, make_reducer: ReducerFactory | None = None) -> None:
        super().__init__()
        self._make_reducer = make_reducer
        self.rank, self.world_size = distributed.get_rank(), distributed.get_world_size()
        self.device = torch.device("cuda" if distributed.get_backend() == "nccl" else "cpu")
        self.divisor = 2.0 ** round(log2(self.world_size) / 2)  # of gradients in 16 bits, before DDP sums them
        self._wrapped: DistributedDataParallel | None = None
        self.replica_group: Any = distributed.group.WORLD

    @contextmanager
    def main_first(self) -> Iterator[None]:
        group = self._untimed_group  # `new_group` must be called by all ranks
        if not self.is_main:
            distributed.barrier(group)
        yield
        if self.is_main:
            distributed.barrier(group)

    @cached_property
    def _untimed_group(self) -> Any:
        """A group of all processes with a timeout of a year, for tasks such as encoding a data set. It still fails
        immediately if another process has ended."""
        return distributed.new_group(backend="gloo", timeout=timedelta(days=365))

    def checkpointer(self, files: Checkpointer) -> ShardedCheckpointer:
        return ShardedCheckpointer(files, self.replica_group.size(), self.replica_group.rank())

    def prepare(self, trainable: Trainable, device: torch.device, dtype: torch.dtype) -> nn.Module:
        self._wrapped, self.reduction = None, Reduction()
        trainable.to(device)
        if make_reducer := self._choose_reducer():
            for p in trainable.parameters():
                self._broadcast(p.detach(), distributed.group.WORLD)
            self._attach_reducer(trainable, make_reducer)
            return trainable
        # Parameters that are frozen during the run lack gradients.
        self._wrapped = DistributedDataParallel(trainable, find_unused_parameters=trainable.may_freeze)
        if any(p.dtype in HALF_FORMATS for p in trainable.parameters()):
            self._wrapped.register_comm_hook(None, lambda _, bucket: self._average_bucket(bucket.buffer()))
        return self._wrapped

    def _average_bucket(self, values: Tensor) -> torch.futures.Future[Tensor]:
        """Start the average of a bucket. That of gradients in 16 bits lacks a division by world_size / divisor, which
        `reduce` adds to their scale."""
        values.div_(self.divisor if values.dtype in HALF_FORMATS else self.world_size)
        return (
            cast(Any, distributed.all_reduce(values, async_op=True)).get_future().then(lambda future: future.value()[0])
        )

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        super().reduce(parameters)
        if self._wrapped is not None:
            rest = torch.tensor(self.world_size / self.divisor, device=self.device)
            for p in parameters:
                if p.grad is not None and p.dtype in HALF_FORMATS:
                    unscale(p.grad, rest)

    def _broadcast(self, values: Tensor, group: Any) -> None:
        """Broadcast the values of a group's first process, in place."""
        on_device = values.to(self.device)
        distributed.broadcast(on_device, group=group, group_src=0)
        values.copy_(on_device)

    def _choose_reducer(self) -> ReducerFactory | None:
        if self._make_reducer or self.grad_compression_rank is None or self.replica_group.size() == 1:
            return self._make_reducer
        return partial(PowerSGD, PowerSGDConfig(rank=self.grad_compression_rank))

    def _attach_reducer(self, trainable: Trainable, make_reducer: ReducerFactory) -> None:
        """Average the gradients over replicas by a reducer."""
        self.reduction = OverlappedReducer(make_reducer(), buckets(trainable.model), Replicas(self.replica_group))

    def _microbatch(self, last: bool) -> AbstractContextManager[object]:
        self.reduction.last = last
        return nullcontext() if last or self._wrapped is None else self._wrapped.no_sync()

    def assert_replicas_equal(self, parameters: Iterable[nn.Parameter]) -> None:
        """Compare hashes of the weights."""
        group = self.replica_group
        parts = [to_local(p.detach()) for p in parameters]
        hashes = [torch.hash_tensor(x) if x.numel() else x.new_zeros((), dtype=torch.uint64) for x in parts]
        local = torch.stack(hashes).view(torch.int64)
        gathered = [torch.empty_like(local) for _ in range(group.size())]
        distributed.all_gather(gathered, local, group=group)
        differ = [i for i, other in enumerate(gathered) if not torch.equal(other, gathered[0])]
        if self.any(bool(differ)):
            ranks = [distributed.get_global_rank(group, i) for i in differ] or "other processes"
            raise UserError(
                f"the weights of process {distributed.get_global_rank(group, 0)} and of {ranks} must be the same, but "
                "differ: restart the run, which resumes from the last checkpoint"
            )

    def sum(self, values: Tensor) -> Tensor:
        """Return the elementwise sum over ranks. For NCCL values on the CPU are copied to the GPU."""
        total = values.to(self.device, copy=True, memory_format=torch.contiguous_format)
        distributed.all_reduce(total)
        return total.to(values.device)

    def all_gather(self, values: Tensor) -> list[Tensor]:
        local = values.to(self.device).contiguous()
        gathered = [torch.empty_like(local) for _ in range(self.world_size)]
        distributed.all_gather(gathered, local)
        return [value.to(values.device) for value in gathered]
