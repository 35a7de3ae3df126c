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
from limner.experiments import tiny_prior
from limner.experiments.tiny_train import Trained
from limner.models.transformer import TransformerConfig
from limner.optim.optimizers import AdamWConfig
from limner.training.parallel import SingleProcess
from limner.training.train_module import Trainable


class SimulatedNetwork:
    """The simulated network: `all` holds the values of the last exchange."""

    def __init__(self) -> None:
        self._pending: list[Tensor] = []
        self.all = torch.empty(0)  # [R, n]

    def send(self, values: Float[Tensor, " n"]) -> None:
        self._pending.append(values.clone())

    def exchange(self) -> None:
        """Exchange the values, after each replica has called `send`."""
        self.all, self._pending = torch.stack(self._pending), []


class SimulatedGroup(Replicas):
    """A simulated process group of one replica. `sent` counts bytes of a ring all-reduce."""

    def __init__(self, network: SimulatedNetwork, count: int) -> None:
        self.network, self._count, self.sent = network, count, 0

    @property
    def count(self) -> int:
        return self._count

    def _exchange(self, values: Tensor, size: int) -> Iterator[Any]:
        self.network.send(values)
        self.sent += 2 * size * (self.count - 1) // self.count
        yield self

    def mean(self, values: Float[Tensor, " n"]) -> PendingWork:
        yield from self._exchange(values, values.nbytes)
        values.copy_(self.network.all.mean(0))

    def compressed_mean(self, values: Float[Tensor, " n"], codec: Codec) -> PendingWork:
        codes = codec.pack(values)
        yield from self._exchange(codec.unpack(codes), codes.nbytes)
        values.copy_(codec.unpack(codec.pack(self.network.all.mean(0))))


class SimulatedReplicas(SingleProcess):
    """The strategy of one process that simulates all replicas, `TrainConfig.accumulate` in number.

    Args:
        make: builds a reducer.
        count: number of replicas.
    """

    def __init__(self, make: Callable[[], Fp32Reducer], count: int) -> None:
        super().__init__()
        self._make, self.count, self._replica = make, count, 0

    def prepare(self, trainable: Trainable, device: torch.device, dtype: torch.dtype) -> nn.Module:
        module = super().prepare(trainable, device, dtype)
        self._network, self._buckets = SimulatedNetwork(), buckets(trainable.model)
        self.groups = [SimulatedGroup(self._network, self.count) for _ in range(self.count)]
        self.reducers = [self._make() for _ in range(self.count)]
        # A replica's parameters share memory with the model's, but have separate gradients.
        self._params = dict(trainable.model.named_parameters())
        self._views = [{name: nn.Parameter(p.detach()) for name, p in self._params.items()} for _ in range(self.count)]
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
        for name, p in self._params.items():
            p.grad = self._views[0][name].grad
            for view in self._views:
                view[name].grad = None
        super().reduce(parameters)

    def _run_lockstep(self, pending: list[PendingWork]) -> None:
        while True:
            finished = [next(work, None) is None for work in pending]
            if all(finished):
                return
            assert not any(finished)  # all wait for the same exchanges
            self._network.exchange()


def train(
    make: Callable[[], Fp32Reducer],
    *,
    width: int,
    steps: int,
    seed: int,
    replicas: int = 2,
    optimizer: Any | None = None,
    clip_norm: float | None = 1.0,
) -> Trained:
    """Train a small prior with replicas, batch size 32. `run.parallel` is the `SimulatedReplicas`."""
    model: TransformerConfig = replace(tiny_prior.MODEL, width=width, depth=4, heads=max(2, width // 48))
    return tiny_prior.train(
        steps, model=model, seed=seed, batch=32, accumulate=replicas, clip_norm=clip_norm,
        optimizer=optimizer or AdamWConfig(lr=2e-3, betas=(0.9, 0.98)),
        parallel=SimulatedReplicas(make, replicas),
    )  # fmt: skip
