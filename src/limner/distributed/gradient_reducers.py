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

_ERROR_BYTES = 16  # limit per weight for error buffers in checkpoints: fp32 weight, average, two moments

Waiting = Iterator[distributed.Work]  # yields communication to wait for; ends when all is done


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

    def mean(self, values: Float[Tensor, " n"]) -> Waiting:
        """Replace values by their mean over the replicas, in fp32. A ring sends each value 2 (R - 1) / R times."""
        if self.count > 1:
            self.sent += 2 * values.numel() * values.element_size() * (self.count - 1) // self.count
            yield _started(distributed.all_reduce(values, group=self.group, async_op=True))
            values /= self.count

    def coded_mean(self, values: Float[Tensor, " n"], codec: Codec) -> Waiting:
        """Replace values by their mean over the replicas, sent in the format of `codec` and summed in fp32.

        Each replica averages one part of the values (all-to-all) and sends the mean to all (all-gather). Codes are
        sent as bytes, because gloo does not support 16-bit integers.
        """
        padding = -values.numel() % self.count
        codes = codec.pack(F.pad(values, (0, padding)))
        if self.count > 1:
            given, got = codes.view(torch.uint8), torch.empty_like(codes)
            self.sent += 2 * given.numel() * (self.count - 1) // self.count
            yield _started(distributed.all_to_all_single(got.view(torch.uint8), given, group=self.group, async_op=True))
            own = codec.pack(codec.unpack(got).view(self.count, -1).mean(0))
            parts = list(given.view(self.count, -1))
            yield _started(distributed.all_gather(parts, own.view(torch.uint8), group=self.group, async_op=True))
        values.copy_(codec.unpack(codes)[: values.numel()])


def _started(work: distributed.Work | None) -> distributed.Work:
    assert work is not None  # async_op
    return work


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are reduced together.

    Attributes:
        parameters: by name.
        repeated: True for a block, whose matrices may be compressed.
    """

    parameters: Mapping[str, nn.Parameter]
    repeated: bool


def buckets(model: nn.Module) -> dict[str, Bucket]:
    """Return the buckets of a model by name. A bucket is a resblock, or an entry of a module list without resblocks.
    Other parameters form one bucket for each child of the model, and "" for its direct parameters."""
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    entries = {f"{name}.{i}" for name, entries in lists.items() for i in range(len(entries))}
    repeated = entries | {name for name, module in model.named_modules() if isinstance(module, Resblock)}
    found: dict[str, dict[str, nn.Parameter]] = {}
    for name, p in model.named_parameters():
        path = name.split(".")
        within = [".".join(path[:i]) for i in range(len(path) - 1, 1, -1)]  # the innermost first
        bucket = next((one for one in within if one in repeated), path[0] if len(path) > 1 else "")
        found.setdefault(bucket, {})[name] = p
    return {bucket: Bucket(parameters, bucket in repeated) for bucket, parameters in found.items()}


@runtime_checkable
class GradientReducer(Protocol):
    """A method of averaging gradients over replicas. `attach` is called once, before the first step."""

    def attach(self, buckets: Mapping[str, Bucket], replicas: Replicas) -> None:
        """Set the buckets by name. Raises `UserError` if the method cannot be applied to them."""
        ...

    def describe(self) -> str:
        """Return a sentence for the log on the reduction, or ""."""
        ...

    def reduce(self, bucket: str) -> Waiting:
        """Start reducing a bucket whose gradients are complete."""
        ...

    def finish(self) -> Waiting:
        """Complete the reduction after `reduce` has ended for all buckets: each `grad` becomes the mean. A gradient
        not finite on one replica is so on all."""
        ...

    def put_back(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take back reduced gradients that will not be applied."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint that is the same on all replicas."""
        ...

    def errors(self) -> dict[str, Tensor]:
        """Return this replica's error buffers by parameter, as stored: integers are codes in 1-6-9. Up to rounding,
        only the mean over replicas matters."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the entries of `tensors` and `errors` together. Raises `UserError` if a shape differs."""
        ...


class Plain:
    """Averages gradients in fp32. Subclasses override `mean` to send values in another format.

    Attributes:
        buckets, replicas: arguments of `attach`.
    """

    buckets: Mapping[str, Bucket]
    replicas: Replicas

    def attach(self, buckets: Mapping[str, Bucket], replicas: Replicas) -> None:
        self.buckets, self.replicas = buckets, replicas

    def describe(self) -> str:
        return ""

    def mean(self, values: Float[Tensor, " n"]) -> Waiting:
        """Replace values, the concatenated gradients of a bucket, by their mean over the replicas."""
        return self.replicas.mean(values)

    def reduce(self, bucket: str) -> Waiting:
        return averaged(self.buckets[bucket].parameters.values(), self.mean)

    def finish(self) -> Waiting:
        yield from ()

    def put_back(self, parameters: Iterable[nn.Parameter]) -> None:
        """Do nothing: a skipped update is lost, as in one process."""

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def errors(self) -> dict[str, Tensor]:
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        pass


def averaged(parameters: Iterable[nn.Parameter], mean: Callable[[Float[Tensor, " n"]], Waiting]) -> Waiting:
    """Concatenate the gradients of the parameters, apply `mean`, and write the result back to them."""
    grads = [p.grad for p in parameters if p.grad is not None]
    parts = [grad_access.grad_values(grad) for grad in grads]
    if sum(part.numel() for part in parts):
        flat = torch.cat([part.flatten().float() for part in parts])
        yield from mean(flat)
        for grad, part, values in zip(grads, parts, flat.split([part.numel() for part in parts]), strict=True):
            grad_access.set_grad_values(grad, values.view_as(part))


class Bf16Reducer(Plain):
    """Averages gradients sent in bfloat16 and summed in fp32."""

    def mean(self, values: Float[Tensor, " n"]) -> Waiting:
        return self.replicas.coded_mean(values, Bf16Codec())


def unpacked(error: Tensor) -> Tensor:
    """Return the values of an error buffer, or of this process's shard if the buffer is sharded."""
    own = to_local(error)
    return own if own.is_floating_point() else E6M9.unpack(own)


def twice(block: str) -> UserError:
    """Return the error for gradients of a block that arrive again after they were sent."""
    return UserError(
        f"{block} was called twice for one loss, so that its gradients would be averaged before they are complete: "
        "let the objective call it once, with all rows in one tensor"
    )


class Reduction:
    """Overlaps a reducer with the backward pass of a model.

    Args:
        buckets: all parameters, by name of the bucket.
        scales: gradient scale by parameter; it may change from step to step. Gradients are divided by it before
            reduction, because error buffers outlive the scale.

    Attributes:
        last: True if the next backward pass completes the gradients.

    The backward pass raises `UserError` if a gradient arrives after its bucket was sent.
    """

    _LAG = 2  # buckets that start before a task resumes

    def __init__(
        self,
        reducer: GradientReducer,
        buckets: Mapping[str, Bucket],
        replicas: Replicas,
        scales: Mapping[Tensor, Tensor | None] | None = None,
    ) -> None:
        self.reducer, self.replicas, self.scales = reducer, replicas, {} if scales is None else scales
        self.last = True
        self._waits_for = {
            name: sum(p.requires_grad for p in bucket.parameters.values()) for name, bucket in buckets.items()
        }
        self._waits = dict(self._waits_for)
        self._begun: list[str] = []
        self._going: list[tuple[Waiting, distributed.Work, int]] = []  # and the number of buckets started by then
        reducer.attach(buckets, replicas)
        for name, bucket in buckets.items():
            for p in bucket.parameters.values():
                if p.requires_grad:
                    p.register_post_accumulate_grad_hook(lambda p, name=name: self._arrived(name, p))

    @torch.no_grad()
    def _arrived(self, name: str, p: Tensor) -> None:
        if not self.last:
            return
        if (scale := self.scales.get(p)) is not None and p.grad is not None:
            grad_access.unscale(p.grad, scale)
        self._waits[name] -= 1
        if self._waits[name] < 0:
            raise twice(f"the block {name!r}")
        if self._waits[name] == 0:
            self._begin(name)

    def _begin(self, name: str) -> None:
        self._begun.append(name)
        self._start(self.reducer.reduce(name))
        self._advance(len(self._begun) - self._LAG)

    def _start(self, task: Waiting) -> None:
        if (work := next(task, None)) is not None:
            self._going.append((task, work, len(self._begun)))

    def _advance(self, begun: int) -> None:
        """Resume, oldest first, the tasks that sent when at most `begun` buckets had started."""
        tasks, self._going = self._going, []
        for task, work, when in tasks:
            if when <= begun:
                work.wait()
                self._start(task)
            else:
                self._going.append((task, work, when))

    def _drain(self) -> None:
        while self._going:
            self._advance(len(self._begun))

    @torch.no_grad()
    def complete(self) -> None:
        """Finish the reduction: each gradient becomes the mean."""
        for name in self._waits:  # buckets with a parameter without gradient
            if name not in self._begun:
                self._begin(name)
        self._drain()
        self._start(self.reducer.finish())
        self._drain()
        self._begun.clear()
        self._waits = dict(self._waits_for)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint that is the same on all replicas. All replicas must call it."""
        return self.reducer.tensors() | ({} if self.errors() else self.mean_errors())

    def errors(self) -> dict[str, Tensor]:
        """Return this replica's error buffers, from which the same number of replicas resumes bit for bit. Returns {}
        if the buffers of all replicas exceed `_ERROR_BYTES` per weight; then `tensors` holds their mean."""
        found = self.reducer.errors()
        size = self.replicas.count * sum(error.nbytes for error in found.values())
        return found if size <= _ERROR_BYTES * sum(error.numel() for error in found.values()) else {}

    def mean_errors(self) -> dict[str, Tensor]:
        """Return the mean of the error buffers over replicas, in fp32. All replicas must call it."""
        found = {}
        for name, error in self.reducer.errors().items():
            mean = unpacked(error).clone()
            for work in self.replicas.mean(mean.view(-1)):
                work.wait()
            found[name] = from_local(mean, error)
        return found

    def load(self, tensors: Mapping[str, Tensor], errors: Iterable[Mapping[str, Tensor]] = ()) -> None:
        """Load `tensors` and error buffers: those of this replica, or of several replicas, which are averaged. Raises
        `UserError` if a shape differs."""
        sums: dict[str, Tensor] = {}
        count = 0
        for one in errors if self.reducer.errors() else ():
            for name, error in one.items():
                sums[name] = from_local(unpacked(sums[name]) + unpacked(error), error) if count else error
            count += 1
        if count > 1:
            sums = {name: from_local(unpacked(error) / count, error) for name, error in sums.items()}
        self.reducer.load({**tensors, **sums})
