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

from limner.distributed.gradient_reducers import GradientReducer, OverlappedReducer, Replicas, buckets
from limner.distributed.sharded_checkpoint import CheckpointDir, ShardedCheckpointer
from limner.errors import UserError
from limner.models.dvae import DVAE
from limner.optim.dtensor import to_local
from limner.optim.grad_access import unscale_all

__all__ = ["ReducerFactory", "Replicated"]

ReducerFactory = Callable[[], GradientReducer]


class Replicated:
    """The strategy of a process of the default process group; see `Parallel`.

    Args:
        make_reducer: constructor of a gradient reducer for each trained model; None takes DistributedDataParallel.
    """

    def __init__(self, make_reducer: ReducerFactory | None = None) -> None:
        self._make_reducer = make_reducer
        self.rank, self.world_size = distributed.get_rank(), distributed.get_world_size()
        self.is_main = self.rank == 0
        self.device = torch.device("cuda" if distributed.get_backend() == "nccl" else "cpu")
        self.reducer: OverlappedReducer | None = None
        self._scales: dict[Tensor, Tensor | None] = {}
        self._wrapped: DistributedDataParallel | None = None

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """See `Parallel`."""
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

    def checkpointer(self, files: CheckpointDir) -> ShardedCheckpointer:
        """See `Parallel`."""
        return ShardedCheckpointer(files, self.world_size, self.rank)

    def shard_stream(self, stream: Any) -> None:
        """See `Parallel`."""
        stream.shard(self.rank, self.world_size)

    def init_context(self) -> AbstractContextManager[object]:
        """See `Parallel`."""
        return nullcontext()

    def prepare(self, trainable: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """See `Parallel`."""
        self._scales = {}
        trainable.to(device)
        if self._make_reducer:
            for p in trainable.parameters():
                self._broadcast(p.detach(), distributed.group.WORLD)
            return self._attach_reducer(trainable, distributed.group.WORLD, self._make_reducer)
        may_freeze = isinstance(trainable.model, DVAE)  # a frozen encoder lacks gradients
        self._wrapped = DistributedDataParallel(trainable, find_unused_parameters=may_freeze)
        return self._wrapped

    def _broadcast(self, values: Tensor, group: Any) -> None:
        """Broadcast the values of a group's first process, in place."""
        on_device = values.to(self.device)
        distributed.broadcast(on_device, group=group, group_src=0)
        values.copy_(on_device)

    def _attach_reducer(self, trainable: nn.Module, group: Any, make_reducer: ReducerFactory) -> nn.Module:
        """Average the gradients over a group by a reducer."""
        self.reducer = OverlappedReducer(make_reducer(), buckets(trainable.model), Replicas(group), self._scales)  # type: ignore[arg-type]
        return trainable

    def summary(self) -> str:
        """See `Parallel`."""
        return self.reducer.reducer.summary() if self.reducer else ""

    def microbatch(self, last: bool) -> AbstractContextManager[object]:
        """See `Parallel`."""
        if self.reducer:
            self.reducer.last = last
        return nullcontext() if last or self._wrapped is None else self._wrapped.no_sync()

    def unsharded(self) -> AbstractContextManager[object]:
        """See `Parallel`."""
        return nullcontext()

    def set_grad_scale(self, parameters: Iterable[nn.Parameter], scale: Tensor | None) -> None:
        """See `Parallel`."""
        self._scales |= dict.fromkeys(parameters, scale)

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        """Finish the reduction, which the backward pass has begun."""
        if self.reducer:
            self.reducer.complete()
        else:
            unscale_all(self._scales)

    def restore_error_feedback(self, parameters: Iterable[nn.Parameter]) -> None:
        """See `Parallel`."""
        if self.reducer:
            self.reducer.reducer.restore_error_feedback(parameters)

    def assert_replicas_equal(self, parameters: Iterable[nn.Parameter]) -> None:
        """See `Parallel`."""
        self._compare_hashes(parameters, distributed.group.WORLD)

    def _compare_hashes(self, parameters: Iterable[nn.Parameter], group: Any) -> None:
        """Raise `UserError` if the weights of a group's processes, which must be the same, have different hashes."""
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

    def state_dict(self) -> dict[str, Tensor]:
        """See `Parallel`."""
        return self.reducer.state_dict() if self.reducer else {}

    def error_buffers(self) -> dict[str, Tensor]:
        """See `Parallel`."""
        return self.reducer.error_buffers() if self.reducer else {}

    def load_state_dict(self, tensors: Mapping[str, Tensor], errors: Iterable[Mapping[str, Tensor]] = ()) -> None:
        """See `Parallel`."""
        if self.reducer:
            self.reducer.load_state_dict(tensors, errors)

    def all_gather_with_grad(self, values: Shaped[Tensor, "n ..."]) -> Shaped[Tensor, "N ..."]:
        """See `Parallel`."""
        return _AllGatherWithGrad.apply(values, self)  # type: ignore[no-any-return]

    def mean(self, values: Tensor) -> Tensor:
        """See `Parallel`."""
        return self.sum(values) / self.world_size

    def sum(self, values: Tensor) -> Tensor:
        """Return the elementwise sum over ranks. For NCCL values on the CPU are copied to the GPU."""
        total = values.to(self.device, copy=True, memory_format=torch.contiguous_format)
        distributed.all_reduce(total)
        return total.to(values.device)

    def any(self, flag: bool) -> bool:
        """See `Parallel`."""
        result = torch.tensor(int(flag), device=self.device)
        distributed.all_reduce(result, distributed.ReduceOp.MAX)
        return bool(result)

    def all_gather(self, values: Tensor) -> list[Tensor]:
        """See `Parallel`."""
        local = values.to(self.device).contiguous()
        gathered = [torch.empty_like(local) for _ in range(self.world_size)]
        distributed.all_gather(gathered, local)
        return [value.to(values.device) for value in gathered]


class _AllGatherWithGrad(torch.autograd.Function):
    """Concatenate the rows of all processes; the gradient of a row is summed over processes."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, parallel: Replicated) -> Tensor:
        ctx.parallel, ctx.rows = parallel, len(values)
        return torch.cat(parallel.all_gather(values))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return ctx.parallel.sum(upstream[0])[ctx.parallel.rank * ctx.rows :][: ctx.rows], None
