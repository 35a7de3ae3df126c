"""Replicas simulated in one process: the reducers of `distributed/`, without processes and without a network.

Each micro-batch of an update is the share of one replica. Each replica has a separate reducer, which gets the
gradients of that share. All replicas reduce a bucket in lockstep: each runs until its reducer waits for communication,
then the values of all replicas are exchanged.

Shapes: R replicas, n values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
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


class SimulatedGroup(Replicas):
    """A simulated process group of one replica. `sent` counts bytes of a ring all-reduce."""

    def __init__(self, strategy: SimulatedReplicas) -> None:
        self.strategy, self.sent = strategy, 0

    @property
    def count(self) -> int:
        return self.strategy.count

    def _exchange(self, values: Tensor, size: int) -> Iterator[Any]:
        self.strategy.outbox.append(values.clone())
        self.sent += 2 * size * (self.count - 1) // self.count
        yield self

    def mean(self, values: Float[Tensor, " n"]) -> PendingWork:
        yield from self._exchange(values, values.nbytes)
        values.copy_(self.strategy.exchanged.mean(0))

    def compressed_mean(self, values: Float[Tensor, " n"], codec: Codec) -> PendingWork:
        codes = codec.pack(values)
        yield from self._exchange(codec.unpack(codes), codes.nbytes)
        values.copy_(codec.unpack(codec.pack(self.strategy.exchanged.mean(0))))


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
        self.count, self._replica = count, 0
        self.reducers = [make() for _ in range(count)]
        self.groups = [SimulatedGroup(self) for _ in range(count)]
        self.outbox: list[Tensor] = []
        self.exchanged = torch.empty(0)

    def prepare(self, trainable: Trainable, device: torch.device, dtype: torch.dtype) -> nn.Module:
        module = super().prepare(trainable, device, dtype)
        self._buckets = buckets(trainable.model)
        # A replica's parameters share memory with the model's, but have separate gradients.
        self._params = dict(trainable.model.named_parameters())
        self._views = [{name: nn.Parameter(p.detach()) for name, p in self._params.items()} for _ in self.reducers]
        for reducer, parameters, group in zip(self.reducers, self._views, self.groups, strict=True):
            replica_buckets = {
                name: replace(bucket, parameters={key: parameters[key] for key in bucket.parameters})
                for name, bucket in self._buckets.items()
            }
            reducer.attach(replica_buckets, group)
        return module

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        """Run one replica's share, and undo the gradient's division by the number of replicas."""
        yield
        for name, p in self._params.items():
            if p.grad is not None:
                self._views[self._replica][name].grad = p.grad.mul_(self.count)
                p.grad = None
        self._replica = 0 if last else self._replica + 1

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        for bucket in reversed(self._buckets):
            self._run_lockstep([reducer.reduce(bucket) for reducer in self.reducers])
        self._run_lockstep([reducer.finish() for reducer in self.reducers])
        for reducer, view in zip(self.reducers, self._views, strict=True):
            list(reducer.parts(view.values()))  # sets all gradients
        for name, p in self._params.items():
            p.grad = self._views[0][name].grad
            for view in self._views:
                view[name].grad = None
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
