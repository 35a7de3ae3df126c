"""Gradients averaged between replicas, bucket by bucket, while the backward pass goes on.

A replica is a process, or a group of processes that share a set of weights; processes with the same part of the weights
meet here. A bucket holds the parameters of a resblock, of the embeddings, of the head. As soon as all its gradients are
there, a `GradientReducer` begins with it. What it does is a generator: it computes, sends, and yields the communication
that it waits for, so that the backward pass of the next two buckets runs meanwhile:

    backward of bucket   k          k-1          k-2          k-3
    reduction            k sends    k-1 sends    k-2 sends    ...
                                                 k goes on    k-1 goes on

All processes start and resume the same generators in the same order, which is what collectives need; none asks whether
communication is through already. What is left when the backward pass has ended goes on in the same order.

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

_ERROR_BYTES = 16  # of a checkpoint, per weight, for error buffers: as many as for weight, average and moments in fp32

Waiting = Iterator[distributed.Work]  # ends when all is done


@runtime_checkable
class Codec(Protocol):
    """How values are sent; `numerics.formats.FloatFormat` is one."""

    def pack(self, x: Tensor, /) -> Tensor: ...

    def unpack(self, codes: Tensor, /) -> Tensor: ...


class Bf16Codec:
    """The upper half of fp32."""

    def pack(self, x: Tensor) -> Tensor:
        return x.bfloat16()

    def unpack(self, codes: Tensor) -> Tensor:
        return codes.float()


@dataclass
class Replicas:
    """The processes of the replicas that hold the same part of the weights.

    Attributes:
        group: their process group.
        sent: bytes that this process has sent, by the collectives' formulas.
    """

    group: distributed.ProcessGroup
    sent: int = 0

    @property
    def count(self) -> int:
        return self.group.size()

    def mean(self, values: Float[Tensor, " n"]) -> Waiting:
        """Replace values by their mean over the replicas, in fp32. A ring sends each value twice, but for 1/R."""
        if self.count > 1:
            self.sent += 2 * values.numel() * values.element_size() * (self.count - 1) // self.count
            yield _started(distributed.all_reduce(values, group=self.group, async_op=True))
            values /= self.count

    def coded_mean(self, values: Float[Tensor, " n"], codec: Codec) -> Waiting:
        """Replace values by their mean over the replicas as `codec` sends it, summed in fp32.

        Each replica sums a part of the values of all and sends the sum to all. Codes travel as bytes: gloo carries no
        integers of 16 bits.
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
    """Parameters whose gradients travel together.

    Attributes:
        parameters: by name.
        repeated: whether they are those of a block, whose matrices may be compressed.
    """

    parameters: Mapping[str, nn.Parameter]
    repeated: bool


def buckets(model: nn.Module) -> dict[str, Bucket]:
    """The parameters of a model by bucket. A bucket is a resblock, or an entry of a module list without resblocks; of
    the rest, what each child of the model has; "" is what the model itself has."""
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
    """Averages gradients over replicas. It is given all buckets before the first step."""

    def attach(self, buckets: Mapping[str, Bucket], replicas: Replicas) -> None:
        """Learn the buckets by name. Raises `UserError` if it can do nothing with them."""
        ...

    def describe(self) -> str:
        """What it does with them, in a sentence; "" if nobody need be told."""
        ...

    def reduce(self, bucket: str) -> Waiting:
        """Begin with a bucket whose gradients are there."""
        ...

    def finish(self) -> Waiting:
        """All buckets are through; afterwards each `grad` is the mean. A gradient that is not finite on one replica is
        so on all."""
        ...

    def put_back(self, parameters: Iterable[nn.Parameter]) -> None:
        """The gradients that it has handed over for these will not be applied."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold, the same on all replicas."""
        ...

    def errors(self) -> dict[str, Tensor]:
        """What this replica has left out of gradients so far, by parameter, as it is kept: integers are codes in 1-6-9.
        Of all replicas only the mean counts, but for the last bits of what follows."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `tensors` and `errors` together. Raises `UserError` if they do not fit."""
        ...


class Plain:
    """All values in fp32. Whoever sends them otherwise gives another `mean`.

    Attributes:
        buckets, replicas: what it is attached to.
    """

    buckets: Mapping[str, Bucket]
    replicas: Replicas

    def attach(self, buckets: Mapping[str, Bucket], replicas: Replicas) -> None:
        self.buckets, self.replicas = buckets, replicas

    def describe(self) -> str:
        return ""

    def mean(self, values: Float[Tensor, " n"]) -> Waiting:
        """Replace values, all gradients of a bucket one behind another, by their mean over the replicas."""
        return self.replicas.mean(values)

    def reduce(self, bucket: str) -> Waiting:
        return averaged(self.buckets[bucket].parameters.values(), self.mean)

    def finish(self) -> Waiting:
        yield from ()

    def put_back(self, parameters: Iterable[nn.Parameter]) -> None:
        """An update that is left out is lost, as in one process."""

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def errors(self) -> dict[str, Tensor]:
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        pass


def averaged(parameters: Iterable[nn.Parameter], mean: Callable[[Float[Tensor, " n"]], Waiting]) -> Waiting:
    """Their gradients, one behind another, become what `mean` makes of them."""
    grads = [p.grad for p in parameters if p.grad is not None]
    parts = [grad_access.grad_values(grad) for grad in grads]
    if sum(part.numel() for part in parts):
        flat = torch.cat([part.flatten().float() for part in parts])
        yield from mean(flat)
        for grad, part, values in zip(grads, parts, flat.split([part.numel() for part in parts]), strict=True):
            grad_access.set_grad_values(grad, values.view_as(part))


class Bf16Reducer(Plain):
    """All values in bfloat16, summed in fp32."""

    def mean(self, values: Float[Tensor, " n"]) -> Waiting:
        return self.replicas.coded_mean(values, Bf16Codec())


def unpacked(error: Tensor) -> Tensor:
    """The numbers of an error buffer, of a shared one this process's shard."""
    own = to_local(error)
    return own if own.is_floating_point() else E6M9.unpack(own)


def twice(block: str) -> UserError:
    """What is said where gradients of a block arrive again after they were sent."""
    return UserError(
        f"{block} was called twice for one loss, so that its gradients would be averaged before they are complete: "
        "let the objective call it once, with all rows in one tensor"
    )


class Reduction:
    """Runs a reducer beside the backward pass of a model.

    Args:
        buckets: of all parameters, by name.
        scales: for parameters whose gradients are scaled, the factor, which may change from step to step. Gradients
            are divided by it before they are reduced, since what a reducer leaves out comes with a later step.

    Attributes:
        last: whether the next backward pass completes the gradients.

    The backward pass raises `UserError` if shards of a block's gradients arrive twice.
    """

    _LAG = 2  # buckets that begin before a communication is waited for

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
        self._going: list[tuple[Waiting, distributed.Work, int]] = []  # and how many had begun when it was sent
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
        """One step of each task that was sent when no more than so many buckets had begun, the oldest first."""
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
        """Wait until every gradient is the mean."""
        for name in self._waits:  # buckets with parameters that had no gradient
            if name not in self._begun:
                self._begin(name)
        self._drain()
        self._start(self.reducer.finish())
        self._drain()
        self._begun.clear()
        self._waits = dict(self._waits_for)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold, the same on all replicas, which must all ask."""
        return self.reducer.tensors() | ({} if self.errors() else self.mean_errors())

    def errors(self) -> dict[str, Tensor]:
        """What it must hold of each replica, with which as many go on bit for bit; {} where that of all replicas would
        be larger than everything else: then `tensors` has the mean."""
        found = self.reducer.errors()
        size = self.replicas.count * sum(error.nbytes for error in found.values())
        return found if size <= _ERROR_BYTES * sum(error.numel() for error in found.values()) else {}

    def mean_errors(self) -> dict[str, Tensor]:
        """The mean of what replicas have left out, in fp32. They must all ask."""
        found = {}
        for name, error in self.reducer.errors().items():
            mean = unpacked(error).clone()
            for work in self.replicas.mean(mean.view(-1)):
                work.wait()
            found[name] = from_local(mean, error)
        return found

    def load(self, tensors: Mapping[str, Tensor], errors: Iterable[Mapping[str, Tensor]] = ()) -> None:
        """The inverse; `errors` are those of this replica, or of several: then it goes on from their mean. Raises
        `UserError` if they do not fit."""
        sums: dict[str, Tensor] = {}
        count = 0
        for one in errors if self.reducer.errors() else ():
            for name, error in one.items():
                sums[name] = from_local(unpacked(sums[name]) + unpacked(error), error) if count else error
            count += 1
        if count > 1:
            sums = {name: from_local(unpacked(error) / count, error) for name, error in sums.items()}
        self.reducer.load({**tensors, **sums})
