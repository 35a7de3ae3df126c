"""Gradients averaged between replicas, block by block, while the backward pass goes on.

A replica is a process, or a group of processes that share a set of weights; processes with the same part of the weights
meet here. As soon as all gradients of a block are there, a `GradientReducer` begins with it. What it does is a
generator: it computes, sends, and yields the communication that it waits for, so that the backward pass of the next
block runs meanwhile:

    backward of block   k          k-1         k-2
    reduction           k sends    k goes on   ...
                                   k-1 sends   k-1 goes on

All processes start and resume the same generators in the same order, which is what collectives need; none asks whether
communication is through already. What is left when the backward pass has ended goes on in the same order.

Shapes: n values of a process, R replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, distributed, nn

from limner.optim.shards import local

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


def blocks(model: nn.Module) -> dict[str, dict[str, nn.Parameter]]:
    """The parameters of a model by block and name: each entry of a module list is a block; the rest is under ""."""
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    names = [f"{name}.{i}" for name, entries in lists.items() for i in range(len(entries))]
    found: dict[str, dict[str, nn.Parameter]] = {name: {} for name in [*names, ""]}
    for name, p in model.named_parameters():
        block = next((block for block in names if name.startswith(f"{block}.")), "")
        found[block][name] = p
    return {block: parameters for block, parameters in found.items() if parameters}


@runtime_checkable
class GradientReducer(Protocol):
    """Averages gradients over replicas. It is given all blocks before the first step."""

    def attach(self, blocks: Mapping[str, Mapping[str, nn.Parameter]], replicas: Replicas) -> None:
        """Learn the blocks, each with its parameters by name; "" is what lies outside."""
        ...

    def reduce(self, block: str) -> Waiting:
        """Begin with a block whose gradients are there."""
        ...

    def finish(self) -> Waiting:
        """All blocks are through; afterwards each `grad` is the mean. A gradient that is not finite on one replica is
        so on all."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold, the same on all replicas. They must all ask."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse, on any number of replicas. Raises `UserError` if they do not fit."""
        ...


class Plain:
    """All values in fp32. Whoever sends them otherwise gives another `mean`.

    Attributes:
        blocks, replicas: what it is attached to.
    """

    blocks: Mapping[str, Mapping[str, nn.Parameter]]
    replicas: Replicas

    def attach(self, blocks: Mapping[str, Mapping[str, nn.Parameter]], replicas: Replicas) -> None:
        self.blocks, self.replicas = blocks, replicas

    def mean(self, values: Float[Tensor, " n"]) -> Waiting:
        """Replace values, all gradients of a block one behind another, by their mean over the replicas."""
        return self.replicas.mean(values)

    def reduce(self, block: str) -> Waiting:
        grads = [local(p.grad) for p in self.blocks[block].values() if p.grad is not None]
        if sum(grad.numel() for grad in grads):
            flat = torch.cat([grad.flatten() for grad in grads])
            yield from self.mean(flat)
            for grad, values in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(values.view_as(grad))

    def finish(self) -> Waiting:
        yield from ()

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        pass


class Bf16Reducer(Plain):
    """All values in bfloat16, summed in fp32."""

    def mean(self, values: Float[Tensor, " n"]) -> Waiting:
        return self.replicas.coded_mean(values, Bf16Codec())


class Reduction:
    """Runs a reducer beside the backward pass of a model.

    Args:
        blocks: parameters by block and name; what is in no block is under "".
        scales: for parameters whose gradients are scaled, the factor, which may change from step to step. Gradients
            are divided by it before they are reduced, since what a reducer leaves out comes with a later step.

    Attributes:
        last: whether the next backward pass completes the gradients.
    """

    def __init__(
        self,
        reducer: GradientReducer,
        blocks: Mapping[str, Mapping[str, nn.Parameter]],
        replicas: Replicas,
        scales: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        self.reducer, self.replicas, self.scales = reducer, replicas, {} if scales is None else scales
        self.last = True
        self._names = list(blocks)
        self._blocks = {name: [p for p in block.values() if p.requires_grad] for name, block in blocks.items()}
        self._waits = {name: len(block) for name, block in self._blocks.items()}
        self._begun: set[str] = set()
        self._going: list[tuple[Waiting, distributed.Work]] = []
        reducer.attach(blocks, replicas)
        for name, block in self._blocks.items():
            for p in block:
                p.register_post_accumulate_grad_hook(lambda p, name=name: self._arrived(name, p))

    @torch.no_grad()
    def _arrived(self, name: str, p: Tensor) -> None:
        if not self.last:
            return
        if p in self.scales and p.grad is not None:
            local(p.grad).div_(self.scales[p])
        self._waits[name] -= 1
        if self._waits[name] == 0:
            self._begin(name)

    def _begin(self, name: str) -> None:
        self._begun.add(name)
        self._advance()
        self._start(self.reducer.reduce(name))

    def _start(self, task: Waiting) -> None:
        if (work := next(task, None)) is not None:
            self._going.append((task, work))

    def _advance(self) -> None:
        """One step of each task, the oldest first."""
        tasks, self._going = self._going, []
        for task, work in tasks:
            work.wait()
            self._start(task)

    def _drain(self) -> None:
        while self._going:
            self._advance()

    @torch.no_grad()
    def complete(self) -> None:
        """Wait until every gradient is the mean."""
        for name in self._names:  # blocks with parameters that had no gradient
            if name not in self._begun:
                self._begin(name)
        self._drain()
        self._start(self.reducer.finish())
        self._drain()
        self._begun.clear()
        self._waits = {name: len(block) for name, block in self._blocks.items()}
