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

from limner.distributed.gradient_reducers import Codec, GradientReducer, Replicas, Waiting, buckets
from limner.models.transformer import TransformerConfig
from limner.optim.optimizers import AdamWConfig
from limner.reproduce import tiny_prior
from limner.reproduce.tiny_train import Trained
from limner.training.parallel import Single
from limner.training.train_module import Trainable


class Exchange:
    """The simulated network: `all` holds the values of the last exchange."""

    def __init__(self) -> None:
        self._brought: list[Tensor] = []
        self.all = torch.empty(0)  # [R, n]

    def put(self, values: Float[Tensor, " n"]) -> None:
        self._brought.append(values.clone())

    def meet(self) -> None:
        """Exchange the values, after each replica has called `put`."""
        self.all, self._brought = torch.stack(self._brought), []


class SimulatedGroup(Replicas):
    """A simulated process group of one replica. `sent` counts bytes of a ring all-reduce."""

    def __init__(self, exchange: Exchange, count: int) -> None:
        self.exchange, self._count, self.sent = exchange, count, 0

    @property
    def count(self) -> int:
        return self._count

    def _exchange(self, values: Tensor, size: int) -> Iterator[Any]:
        self.exchange.put(values)
        self.sent += 2 * size * (self.count - 1) // self.count
        yield self

    def mean(self, values: Float[Tensor, " n"]) -> Waiting:
        yield from self._exchange(values, values.nbytes)
        values.copy_(self.exchange.all.mean(0))

    def coded_mean(self, values: Float[Tensor, " n"], codec: Codec) -> Waiting:
        codes = codec.pack(values)
        yield from self._exchange(codec.unpack(codes), codes.nbytes)
        values.copy_(codec.unpack(codec.pack(self.exchange.all.mean(0))))


class SimulatedReplicas(Single):
    """The strategy of one process that simulates all replicas, `TrainConfig.accumulate` in number.

    Args:
        make: builds a reducer.
        count: number of replicas.
    """

    def __init__(self, make: Callable[[], GradientReducer], count: int) -> None:
        super().__init__()
        self._make, self.count, self._replica = make, count, 0

    def prepare(self, trainable: Trainable, device: torch.device, dtype: torch.dtype) -> nn.Module:
        module = super().prepare(trainable, device, dtype)
        self._exchange, self._buckets = Exchange(), buckets(trainable.model)
        self.groups = [SimulatedGroup(self._exchange, self.count) for _ in range(self.count)]
        self.reducers = [self._make() for _ in range(self.count)]
        # A replica's parameters share memory with the model's, but have separate gradients.
        self._shared = dict(trainable.model.named_parameters())
        self._own = [{name: nn.Parameter(p.detach()) for name, p in self._shared.items()} for _ in range(self.count)]
        for reducer, own, group in zip(self.reducers, self._own, self.groups, strict=True):
            mine = {
                name: replace(bucket, parameters={one: own[one] for one in bucket.parameters})
                for name, bucket in self._buckets.items()
            }
            reducer.attach(mine, group)
        return module

    @contextmanager
    def part(self, last: bool) -> Iterator[None]:
        """Run one replica's share, and undo the gradient's division by the number of replicas."""
        yield
        for name, p in self._shared.items():
            if p.grad is not None:
                self._own[self._replica][name].grad = p.grad.mul_(self.count)
                p.grad = None
        self._replica = 0 if last else self._replica + 1

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        for bucket in reversed(self._buckets):
            self._together([reducer.reduce(bucket) for reducer in self.reducers])
        self._together([reducer.finish() for reducer in self.reducers])
        for name, p in self._shared.items():
            p.grad = self._own[0][name].grad
            for own in self._own:
                own[name].grad = None
        super().reduce(parameters)

    def _together(self, waiting: list[Waiting]) -> None:
        while True:
            through = [next(one, None) is None for one in waiting]
            if all(through):
                return
            assert not any(through)  # all wait for the same exchanges
            self._exchange.meet()


def train(
    make: Callable[[], GradientReducer],
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
