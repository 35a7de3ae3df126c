"""Overlap of gradient reduction with the backward pass.

When the gradients of a bucket are complete, the reducer starts a generator, which computes, sends, and yields each
communication it must wait for. Meanwhile the backward pass of the next two buckets runs:

    backward of bucket   k          k-1          k-2          k-3
    reduction            k sends    k-1 sends    k-2 sends    ...
                                                 k resumes    k-1 resumes

Collectives must be issued in the same order on all processes. Generators therefore start and resume in a fixed order,
regardless of when communication finishes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, distributed, nn

from limner.distributed.gradient_reducers import Bucket, Fp32Reducer, PendingWork, Replicas, unpack_error
from limner.errors import UserError
from limner.optim import grad_access
from limner.optim.dtensor import from_local
from limner.training.parallel import Reduction

__all__ = ["OverlappedReducer", "double_backward_error"]

MAX_ERROR_BYTES_PER_WEIGHT = 16  # limit per weight for error buffers in checkpoints: fp32 weight, average, two moments


def double_backward_error(block: str) -> UserError:
    """Return the error for gradients of a block that arrive again after they were sent."""
    return UserError(
        f"the objective called {block} twice for one loss, so its gradients would be averaged before they are "
        "complete: let the objective call it once, with all rows in one tensor"
    )


class OverlappedReducer(Reduction):
    """Overlaps a reducer with the backward pass of a model.

    `buckets` holds all parameters by name of the bucket. Gradients are divided by their scale before reduction, because
    error buffers outlive the scale. The backward pass raises `UserError` if a gradient arrives after its bucket was
    sent.
    """

    MAX_IN_FLIGHT = 2  # buckets that start before a task resumes

    def __init__(self, reducer: Fp32Reducer, buckets: Mapping[str, Bucket], replicas: Replicas) -> None:
        super().__init__()
        self.reducer, self.replicas = reducer, replicas
        self._started_buckets: list[str] = []
        self._in_flight: list[tuple[PendingWork, distributed.Work, int]] = []  # and the number of started buckets
        reducer.attach(buckets, replicas)
        trained = {name: [p for p in b.parameters.values() if p.requires_grad] for name, b in buckets.items()}
        self._num_grads = {name: len(parameters) for name, parameters in trained.items()}
        self._missing = dict(self._num_grads)
        self._hooks = [
            p.register_post_accumulate_grad_hook(lambda p, name=name: self._on_gradient(name, p))
            for name, parameters in trained.items()
            for p in parameters
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

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
        for name in self._missing:  # buckets with a parameter without gradient
            if name not in self._started_buckets:
                self._start_bucket(name)
        self._drain()
        self._advance_task(self.reducer.finish())
        self._drain()
        self._started_buckets.clear()
        self._missing = dict(self._num_grads)

    def summary(self) -> str:
        return self.reducer.summary()

    def restore_error_feedback(self, parameters: Iterable[nn.Parameter]) -> None:
        self.reducer.restore_error_feedback(parameters)

    def grad_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        return self.reducer.grad_norm(parameters)

    def parts(self, parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        return self.reducer.parts(parameters)

    def state_dict(self) -> dict[str, Tensor]:
        return self.reducer.state_dict() | ({} if self.error_buffers() else self.mean_error_buffers())

    def error_buffers(self) -> dict[str, Tensor]:
        """Return this replica's error buffers, from which the same number of replicas resumes bit for bit. Returns {}
        if all replicas' buffers exceed `MAX_ERROR_BYTES_PER_WEIGHT`; then `state_dict` has their mean."""
        errors = self.reducer.error_buffers()
        size = self.replicas.count * sum(error.nbytes for error in errors.values())
        return errors if size <= MAX_ERROR_BYTES_PER_WEIGHT * sum(error.numel() for error in errors.values()) else {}

    def mean_error_buffers(self) -> dict[str, Tensor]:
        means = {}
        for name, error in self.reducer.error_buffers().items():
            mean = unpack_error(error).clone()
            for work in self.replicas.mean(mean.view(-1)):
                work.wait()
            means[name] = from_local(mean, error)
        return means

    def load_state_dict(self, tensors: Mapping[str, Tensor], errors: Iterable[Mapping[str, Tensor]] = ()) -> None:
        """Load `tensors` and error buffers: those of this replica, or of several replicas, which are averaged."""
        sums: dict[str, Tensor] = {}
        count = 0
        for count, buffers in enumerate(errors if self.reducer.error_buffers() else (), 1):  # noqa: B007
            for name, error in buffers.items():
                sums[name] = (
                    from_local(unpack_error(sums[name]) + unpack_error(error), error) if name in sums else error
                )
        if count > 1:
            sums = {name: from_local(unpack_error(error) / count, error) for name, error in sums.items()}
        self.reducer.load_state_dict({**tensors, **sums})
