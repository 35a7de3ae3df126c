"""Replicas simulated in one process: the reducers of `distributed/`, without processes and without a network.

Each micro-batch of an update is the share of one replica. Each replica has a separate reducer, which gets the
gradients of that share. All replicas reduce a bucket in lockstep: each runs until its reducer waits for communication,
then the values of all replicas are exchanged.

Shapes: R replicas, n values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from limner.distributed.gradient_reducers import Codec, Fp32Reducer, PendingWork, Replicas, buckets
from limner.experiments.sweep import Result
from limner.experiments.tiny_models import PRIOR, train_prior
from limner.optim.param_groups import block_matrices
from limner.training.parallel import SingleProcess
from limner.training.train_module import Trainable


@dataclass
class SimulatedGroup(Replicas):
    """A simulated process group of one replica, whose `group` is the strategy."""

    group: Any

    def _exchange(self, values: Tensor, size: int) -> Iterator[Any]:
        self.group.outbox.append(values.clone())
        self.sent += 2 * size * (self.count - 1) // self.count
        yield self

    def mean(self, values: Float[Tensor, " n"]) -> PendingWork:
        yield from self._exchange(values, values.nbytes)
        values.copy_(self.group.exchanged.mean(0))

    def compressed_mean(self, values: Float[Tensor, " n"], codec: Codec) -> PendingWork:
        codes = codec.pack(values)
        yield from self._exchange(codec.unpack(codes), codes.nbytes)
        values.copy_(codec.unpack(codec.pack(self.group.exchanged.mean(0))))


class SimulatedReplicas(SingleProcess):
    """The strategy of one process that simulates all replicas, `TrainConfig.accumulate` in number.

    Args:
        make: builds a reducer.
        count: number of replicas.

    Attributes:
        outbox: values of the replicas that wait for the next exchange.
        exchanged: values of the last exchange, [R, n].
    """

    def __init__(self, make: Callable[[], Fp32Reducer], count: int) -> None:
        super().__init__()
        self.reducers = [make() for _ in range(count)]
        self.groups = [SimulatedGroup(self) for _ in range(count)]
        self.outbox: list[Tensor] = []
        self.exchanged = torch.empty(0)
        self._replica = 0

    def size(self) -> int:
        return len(self.reducers)

    def prepare(self, trainable: Trainable, device: torch.device, dtype: torch.dtype) -> nn.Module:
        module = super().prepare(trainable, device, dtype)
        self._model, self._models = trainable.model, [copy.deepcopy(trainable.model) for _ in self.reducers]
        for reducer, model, group in zip(self.reducers, self._models, self.groups, strict=True):
            for p, shared in zip(model.parameters(), self._model.parameters(), strict=True):
                p.data = shared.data  # the gradients are separate
            reducer.attach(buckets(model), group)
        return module

    @contextmanager
    def _microbatch(self, last: bool) -> Iterator[None]:
        """Run one replica's share, and undo the gradient's division by the number of replicas."""
        yield
        for p, own in zip(self._model.parameters(), self._models[self._replica].parameters(), strict=True):
            if p.grad is not None:
                own.grad, p.grad = p.grad.mul_(self.size()), None
        self._replica = 0 if last else self._replica + 1

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        for bucket in reversed(buckets(self._model)):
            self._run_lockstep([reducer.reduce(bucket) for reducer in self.reducers])
        self._run_lockstep([reducer.finish() for reducer in self.reducers])
        for reducer, model in zip(self.reducers, self._models, strict=True):
            list(reducer.parts(model.parameters()))  # sets all gradients
        for p, first in zip(self._model.parameters(), self._models[0].parameters(), strict=True):
            p.grad = first.grad
        for model in self._models:
            model.zero_grad(set_to_none=True)
        super().reduce(parameters)

    def _run_lockstep(self, pending: list[PendingWork]) -> None:
        while not all(finished := [next(work, None) is None for work in pending]):
            assert not any(finished)  # all wait for the same exchange
            self.exchanged = torch.stack(self.outbox)
            self.outbox.clear()


def train(
    *, reducer: Callable[[], Fp32Reducer], width: int, steps: int, clip_norm: float | None = 1.0, **settings: Any
) -> tuple[Result, list[Any]]:
    """Train a small prior with two replicas, batch size 32.

    Returns the losses with the bytes sent per step, of all parameters and of block matrices, and the reducers.
    """
    strategy = SimulatedReplicas(reducer, 2)
    model = replace(PRIOR, width=width, depth=4, heads=max(2, width // 48))
    run, losses = train_prior(
        model=model, steps=steps, batch=32, accumulate=2, parallel=strategy, clip_norm=clip_norm, **settings
    )
    matrices = frozenset(block_matrices(run.model))
    # With two replicas, a ring all-reduce sends each uncompressed number once.
    uncompressed = sum(p.nbytes for p in run.model.parameters() if p not in matrices)
    sent = strategy.groups[0].sent / steps
    return {"loss": losses, "sent": sent, "sent_matrices": sent - uncompressed}, strategy.reducers


def trial(**settings: Any) -> Result:
    """Return the result of `train`."""
    return train(**settings)[0]
