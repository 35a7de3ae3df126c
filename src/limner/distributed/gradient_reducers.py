"""Gradient reduction between replicas, bucket by bucket, overlapped with the backward pass.

A replica is a process, or a group of processes that shards a set of weights. Processes that hold the same shard reduce
its gradients together. A bucket holds the parameters of a resblock, of the embeddings, or of the head. When its
gradients are complete, a `GradientReducer` starts a generator, which computes, sends, and yields each communication it
must wait for. Meanwhile the backward pass of the next two buckets runs:

    backward of bucket   k          k-1          k-2          k-3
    reduction            k sends    k-1 sends    k-2 sends    ...
                                                 k resumes    k-1 resumes

Collectives must be issued in the same order on all processes. Generators therefore start and resume in a fixed order,
regardless of when communication finishes.

Shapes: n values of a process, R replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, distributed, nn

from limner.errors import UserError
from limner.models.transformer import Resblock
from limner.numerics.formats import E6M9
from limner.optim import grad_access
from limner.optim.dtensor import from_local, to_local

__all__ = [
    "Bf16Codec",
    "Bf16Reducer",
    "Bucket",
    "Codec",
    "Fp32Reducer",
    "GradientReducer",
    "OverlappedReducer",
    "PendingWork",
    "Replicas",
    "average_grads",
    "buckets",
    "double_backward_error",
    "unpack_error",
]

MAX_ERROR_BYTES_PER_WEIGHT = 16  # limit per weight for error buffers in checkpoints: fp32 weight, average, two moments

PendingWork = Iterator[distributed.Work]  # yields communication to wait for; ends when all is done


@runtime_checkable
class Codec(Protocol):
    """A format for sending values, for example `numerics.formats.FloatFormat`."""

    def pack(self, x: Tensor, /) -> Tensor: ...

    def unpack(self, codes: Tensor, /) -> Tensor: ...


class Bf16Codec:
    """bfloat16, the upper half of fp32."""

    def pack(self, x: Tensor) -> Tensor:
        return x.bfloat16()

    def unpack(self, codes: Tensor) -> Tensor:
        return codes.float()


@dataclass
class Replicas:
    """The processes of the replicas that hold the same part of the weights.

    Attributes:
        group: their process group.
        sent: bytes sent by this process, from the collectives' cost formulas.
    """

    group: distributed.ProcessGroup
    sent: int = 0

    @property
    def count(self) -> int:
        return self.group.size()

    def mean(self, values: Float[Tensor, " n"]) -> PendingWork:
        """Replace values by their mean over the replicas, in fp32. A ring sends each value 2 (R - 1) / R times."""
        if self.count > 1:
            self.sent += 2 * values.numel() * values.element_size() * (self.count - 1) // self.count
            yield _started(distributed.all_reduce(values, group=self.group, async_op=True))
            values /= self.count

    def compressed_mean(self, values: Float[Tensor, " n"], codec: Codec) -> PendingWork:
        """Replace values by their mean over the replicas, sent in the format of `codec` and summed in fp32.

        Each replica averages one part of the values (all-to-all) and sends the mean to all (all-gather). Codes are
        sent as bytes, because gloo does not support 16-bit integers.
        """
        padding = -values.numel() % self.count
        codes = codec.pack(F.pad(values, (0, padding)))
        if self.count > 1:
            send, recv = codes.view(torch.uint8), torch.empty_like(codes)
            self.sent += 2 * send.numel() * (self.count - 1) // self.count
            yield _started(distributed.all_to_all_single(recv.view(torch.uint8), send, group=self.group, async_op=True))
            mean = codec.pack(codec.unpack(recv).view(self.count, -1).mean(0))
            parts = list(send.view(self.count, -1))
            yield _started(distributed.all_gather(parts, mean.view(torch.uint8), group=self.group, async_op=True))
        values.copy_(codec.unpack(codes)[: values.numel()])


def _started(work: distributed.Work | None) -> distributed.Work:
    assert work is not None  # async_op
    return work


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are reduced together.

    Attributes:
        parameters: by name.
        in_block: True for a block, whose matrices may be compressed.
    """

    parameters: Mapping[str, nn.Parameter]
    in_block: bool


def buckets(model: nn.Module) -> dict[str, Bucket]:
    """Return the buckets of a model by name. A bucket is a resblock, or an entry of a module list without resblocks.
    Other parameters form one bucket for each child of the model, and "" for its direct parameters."""
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    entries = {f"{name}.{i}" for name, entries in lists.items() for i in range(len(entries))}
    blocks = entries | {name for name, module in model.named_modules() if isinstance(module, Resblock)}
    parameters: dict[str, dict[str, nn.Parameter]] = {}
    for name, p in model.named_parameters():
        path = name.split(".")
        ancestors = [".".join(path[:i]) for i in range(len(path) - 1, 1, -1)]  # the innermost first
        bucket = next((module for module in ancestors if module in blocks), path[0] if len(path) > 1 else "")
        parameters.setdefault(bucket, {})[name] = p
    return {bucket: Bucket(entry, bucket in blocks) for bucket, entry in parameters.items()}


@runtime_checkable
class GradientReducer(Protocol):
    """A method of averaging gradients over replicas. `attach` is called once, before the first step."""

    def attach(self, buckets: Mapping[str, Bucket], replicas: Replicas) -> None:
        """Set the buckets by name. Raises `UserError` if the method cannot be applied to them."""
        ...

    def summary(self) -> str:
        """Return a sentence for the log on the reduction, or ""."""
        ...

    def reduce(self, bucket: str) -> PendingWork:
        """Start reducing a bucket whose gradients are complete."""
        ...

    def finish(self) -> PendingWork:
        """Complete the reduction after `reduce` has ended for all buckets: each `grad` becomes the mean. A gradient
        not finite on one replica is so on all."""
        ...

    def restore_error_feedback(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take back reduced gradients that will not be applied."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint that is the same on all replicas."""
        ...

    def error_buffers(self) -> dict[str, Tensor]:
        """Return this replica's error buffers by parameter, as stored: integers are codes in 1-6-9. Up to rounding,
        only the mean over replicas matters."""
        ...

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the entries of `state_dict` and `error_buffers` together. Raises `UserError` if a shape differs."""
        ...


class Fp32Reducer:
    """Averages gradients in fp32. Subclasses override `mean` to send values in another format.

    Attributes:
        buckets, replicas: arguments of `attach`.
    """

    buckets: Mapping[str, Bucket]
    replicas: Replicas

    def attach(self, buckets: Mapping[str, Bucket], replicas: Replicas) -> None:
        self.buckets, self.replicas = buckets, replicas

    def summary(self) -> str:
        return ""

    def mean(self, values: Float[Tensor, " n"]) -> PendingWork:
        """Replace values, the concatenated gradients of a bucket, by their mean over the replicas."""
        return self.replicas.mean(values)

    def reduce(self, bucket: str) -> PendingWork:
        return average_grads(self.buckets[bucket].parameters.values(), self.mean)

    def finish(self) -> PendingWork:
        yield from ()

    def restore_error_feedback(self, parameters: Iterable[nn.Parameter]) -> None:
        """Do nothing: a skipped update is lost, as in one process."""

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def error_buffers(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        pass


def average_grads(params: Iterable[nn.Parameter], mean: Callable[[Float[Tensor, " n"]], PendingWork]) -> PendingWork:
    """Concatenate the gradients of the parameters, apply `mean`, and write the result back to them."""
    grads = [p.grad for p in params if p.grad is not None]
    parts = [grad_access.grad_values(grad) for grad in grads]
    if sum(part.numel() for part in parts):
        flat = torch.cat([part.flatten().float() for part in parts])
        yield from mean(flat)
        for grad, part, values in zip(grads, parts, flat.split([part.numel() for part in parts]), strict=True):
            grad_access.set_grad_values(grad, values.view_as(part))


class Bf16Reducer(Fp32Reducer):
    """Averages gradients sent in bfloat16 and summed in fp32."""

    def mean(self, values: Float[Tensor, " n"]) -> PendingWork:
        return self.replicas.compressed_mean(values, Bf16Codec())


def unpack_error(error: Tensor) -> Tensor:
    """Return the values of an error buffer, or of this process's shard if the buffer is sharded."""
    shard = to_local(error)
    return shard if shard.is_floating_point() else E6M9.unpack(shard)


def double_backward_error(block: str) -> UserError:
    """Return the error for gradients of a block that arrive again after they were sent."""
    return UserError(
        f"the objective called {block} twice for one loss, so its gradients would be averaged before they are "
        "complete: let the objective call it once, with all rows in one tensor"
    )


class OverlappedReducer:
    """Overlaps a reducer with the backward pass of a model.

    Args:
        buckets: all parameters, by name of the bucket.
        scales: gradient scale by parameter; it may change from step to step. Gradients are divided by it before
            reduction, because error buffers outlive the scale.

    Attributes:
        last: True if the next backward pass completes the gradients.

    The backward pass raises `UserError` if a gradient arrives after its bucket was sent.
    """

    MAX_IN_FLIGHT = 2  # buckets that start before a task resumes

    def __init__(
        self,
        reducer: GradientReducer,
        buckets: Mapping[str, Bucket],
        replicas: Replicas,
        scales: Mapping[Tensor, Tensor | None] | None = None,
    ) -> None:
        self.reducer, self.replicas, self.scales = reducer, replicas, {} if scales is None else scales
        self.last = True
        self._num_grads = {
            name: sum(p.requires_grad for p in bucket.parameters.values()) for name, bucket in buckets.items()
        }
        self._missing = dict(self._num_grads)
        self._started_buckets: list[str] = []
        self._in_flight: list[tuple[PendingWork, distributed.Work, int]] = []  # and the number of started buckets
        reducer.attach(buckets, replicas)
        for name, bucket in buckets.items():
            for p in bucket.parameters.values():
                if p.requires_grad:
                    p.register_post_accumulate_grad_hook(lambda p, name=name: self._on_gradient(name, p))

    @torch.no_grad()
    def _on_gradient(self, name: str, p: Tensor) -> None:
        if not self.last:
            return
        if (scale := self.scales.get(p)) is not None and p.grad is not None:
            grad_access.unscale(p.grad, scale)
        self._missing[name] -= 1
        if self._missing[name] < 0:
            raise double_backward_error(f"the block {name!r}")
        if self._missing[name] == 0:
            self._start_bucket(name)

    def _start_bucket(self, name: str) -> None:
        self._started_buckets.append(name)
        self._advance_task(self.reducer.reduce(name))
        self._advance(len(self._started_buckets) - self.MAX_IN_FLIGHT)

    def _advance_task(self, task: PendingWork) -> None:
        if (work := next(task, None)) is not None:
            self._in_flight.append((task, work, len(self._started_buckets)))

    def _advance(self, started: int) -> None:
        """Resume, oldest first, the tasks that sent when at most `started` buckets had started."""
        tasks, self._in_flight = self._in_flight, []
        for task, work, at in tasks:
            if at <= started:
                work.wait()
                self._advance_task(task)
            else:
                self._in_flight.append((task, work, at))

    def _drain(self) -> None:
        while self._in_flight:
            self._advance(len(self._started_buckets))

    @torch.no_grad()
    def complete(self) -> None:
        """Finish the reduction: each gradient becomes the mean."""
        for name in self._missing:  # buckets with a parameter without gradient
            if name not in self._started_buckets:
                self._start_bucket(name)
        self._drain()
        self._advance_task(self.reducer.finish())
        self._drain()
        self._started_buckets.clear()
        self._missing = dict(self._num_grads)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint that is the same on all replicas. All replicas must call it."""
        return self.reducer.state_dict() | ({} if self.error_buffers() else self.mean_error_buffers())

    def error_buffers(self) -> dict[str, Tensor]:
        """Return this replica's error buffers, from which the same number of replicas resumes bit for bit. Returns {}
        if all replicas' buffers exceed `MAX_ERROR_BYTES_PER_WEIGHT`; then `state_dict` has their mean."""
        errors = self.reducer.error_buffers()
        size = self.replicas.count * sum(error.nbytes for error in errors.values())
        return errors if size <= MAX_ERROR_BYTES_PER_WEIGHT * sum(error.numel() for error in errors.values()) else {}

    def mean_error_buffers(self) -> dict[str, Tensor]:
        """Return the mean of the error buffers over replicas, in fp32. All replicas must call it."""
        means = {}
        for name, error in self.reducer.error_buffers().items():
            mean = unpack_error(error).clone()
            for work in self.replicas.mean(mean.view(-1)):
                work.wait()
            means[name] = from_local(mean, error)
        return means

    def load_state_dict(self, tensors: Mapping[str, Tensor], errors: Iterable[Mapping[str, Tensor]] = ()) -> None:
        """Load `tensors` and error buffers: those of this replica, or of several replicas, which are averaged. Raises
        `UserError` if a shape differs."""
        sums: dict[str, Tensor] = {}
        count = 0
        for buffers in errors if self.reducer.error_buffers() else ():
            for name, error in buffers.items():
                sums[name] = from_local(unpack_error(sums[name]) + unpack_error(error), error) if count else error
            count += 1
        if count > 1:
            sums = {name: from_local(unpack_error(error) / count, error) for name, error in sums.items()}
        self.reducer.load_state_dict({**tensors, **sums})
