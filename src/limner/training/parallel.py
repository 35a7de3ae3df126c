"""Strategies for parallel training, and the strategy of a single process.

Each of `world_size` ranks runs the same loop on its share of each batch. The seed alone fixes the order of samples;
ranks only divide it. Consequences:

- Losses, gradients and weights equal those of one process on the whole batch, up to the order of sums. The objective
  must be a mean over samples, or provide values of the whole batch (`batch_stats`), or join the ranks' results
  (`gathered`: the contrastive loss takes negatives from all ranks, and `BalancedELB` balances the codes of all ranks).
- Dropout and gumbel noise differ between ranks, because ranks hold different samples. With such noise a run on two
  ranks is equivalent to a run on one, but not equal. A run resumed on the same number of ranks is equal.

Every rank evaluates, on the same weights. The first rank writes files, and all ranks read them. All ranks write
checkpoints together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, ClassVar, Protocol

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from limner.blocks import leading_part
from limner.errors import UserError
from limner.numerics.precision import upcast
from limner.optim.grad_access import total_norm, unscale
from limner.spans import span
from limner.training.checkpoint import Checkpointer
from limner.training.config import TrainConfig
from limner.training.train_module import Batch, Trainable

CANNOT_FREEZE = "these processes cannot freeze blocks: choose --parallel pipeline, or start without torchrun"


class ReductionState:
    """The state of a reduction of gradients over ranks: error buffers, if gradients are compressed."""

    def summary(self) -> str:
        """Return a sentence for the log on the reduction, or ""."""
        return ""

    def restore_error_feedback(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add averaged gradients that the update leaves out to the error buffers: they contain earlier residuals.
        Without buffers a skipped update is lost, as in one process."""

    def grad_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return the norm of all gradients together, [], equal on all ranks."""
        return total_norm(p.grad for p in parameters if p.grad is not None)

    def parts(self, parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Yield parameters whose gradients are set, part by part. The caller updates a part and sets its gradients to
        None before the next. All parts together are all parameters with gradients."""
        yield [p for p in parameters if p.grad is not None]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint by name, the same on all replicas. All ranks must call it."""
        return {}

    def mean_error_buffers(self) -> dict[str, Tensor]:
        """Return the mean of the error buffers over replicas, in fp32. All replicas must call it."""
        return {}

    def error_buffers(self) -> dict[str, Tensor]:
        """Return this replica's error buffers for a checkpoint by parameter, as stored: integers are codes in 1-6-9. Up
        to rounding, only the mean over replicas matters."""
        return {}


class Reduction(ReductionState):
    """The reduction of gradients to their mean over ranks. Here the backward pass has averaged them, or there is one
    rank.

    Attributes:
        scales: factor [] of the backward pass by parameter, whose value may change between steps.
        last: True if the next backward pass completes the gradients.
    """

    def __init__(self) -> None:
        self.scales: dict[Tensor, Tensor] = {}
        self.last = True

    def complete(self) -> None:
        """Finish the reduction after the backward pass: each gradient becomes the mean, divided by its scale. `parts`
        sets compressed ones."""
        for p, scale in self.scales.items():
            if p.grad is not None:
                unscale(p.grad, scale)

    def close(self) -> None:
        """Remove hooks installed on parameters, which would keep the reduction and the parameters alive."""

    def load_state_dict(self, tensors: Mapping[str, Tensor], errors: Iterable[Mapping[str, Tensor]] = ()) -> None:
        """Load the state from CPU tensors, whole or sharded. `errors` holds the buffers of this replica or, if the
        number of replicas has changed, of each saved replica. Raises `UserError` if a shape differs."""


class GradientInputs(Protocol):
    """The part of a `TrainState` that computing gradients needs."""

    config: TrainConfig
    device: torch.device
    trainable: Trainable
    wrapped: nn.Module
    generator: torch.Generator
    step: int


class Parallel(ABC):
    """A strategy for training on several processes. All ranks call the same methods in the same order.

    A strategy implements the abstract methods. Strategies that shard weights override more.

    Attributes:
        rank: rank of this process, from 0.
        world_size: number of processes.
        reduction: reduction of the gradients of the model that `prepare` took last.
        grad_compression_rank: rank of PowerSGD between replicas for the next model; None sends fp32.
        can_freeze: True if the strategy implements `freeze`.
    """

    rank: int
    world_size: int
    grad_compression_rank: int | None = None
    can_freeze: ClassVar[bool] = False

    def __init__(self) -> None:
        self.reduction = Reduction()

    @abstractmethod
    def prepare(self, trainable: Trainable, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """Move the module to the device, shard or wrap it, and set `reduction`; return the module to call instead. The
        device need not hold all weights. `dtype` is the format of matrix products under autocast."""

    @abstractmethod
    def sum(self, values: Tensor) -> Tensor:
        """Return the elementwise sum over ranks."""

    @abstractmethod
    def all_gather(self, values: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, of equal shape, by rank."""

    @abstractmethod
    def assert_replicas_equal(self, parameters: Iterable[nn.Parameter]) -> None:
        """Raise `UserError` if weights differ between ranks that must hold the same ones."""

    def mean(self, values: Tensor) -> Tensor:
        """Return the elementwise mean over ranks."""
        return self.sum(values) / self.world_size

    def sum_over_stages(self, values: Tensor) -> Tensor:
        """Return the elementwise sum over the ranks that each hold other parameters of one replica of the model."""
        return values

    def any(self, flag: bool) -> bool:
        """Return True if any rank passes True."""
        return bool(self.sum(torch.tensor(int(flag))))

    def merge(self, values: dict[str, float]) -> dict[str, float]:
        """Return values by name of the whole model, from those of the part that this rank computes."""
        return values

    def all_gather_with_grad(self, values: Shaped[Tensor, "n ..."]) -> Shaped[Tensor, "N ..."]:
        """Concatenate the rows of all ranks, by rank. The gradient of a row, summed over the ranks' losses, flows back
        to the rank of the row."""
        return _AllGatherWithGrad.apply(values, self)  # type: ignore[no-any-return]

    @property
    def is_main(self) -> bool:
        """True on the rank that writes files."""
        return self.rank == 0

    def main_first(self) -> AbstractContextManager[object]:
        """Return a context manager whose block the writing rank runs first, the others after it."""
        return nullcontext()

    def checkpointer(self, files: Checkpointer) -> Checkpointer:
        """Return a checkpointer that keeps the states of all ranks in `files`."""
        return files

    def shard_stream(self, stream: Any) -> None:
        """Make the stream yield this rank's share of each batch."""
        if self.data_shares > 1:
            stream.shard(self.rank, self.data_shares)

    @property
    def data_shares(self) -> int:
        """Number of shares into which the ranks divide each batch."""
        return self.world_size

    def init_context(self) -> AbstractContextManager[object]:
        """Return a context manager in which all ranks build a model for `prepare`. Its weights may be sharded, with the
        values that one process would draw; use `optim/dtensor.py` to read or change them."""
        return nullcontext()

    def gradients(self, run: GradientInputs, batch: Batch) -> dict[str, Tensor]:
        """Run forward and backward of this rank's batch in micro-batches, whose sizes differ by at most one. Return the
        loss and the metrics of the objective, weighted by samples, "loss" first."""
        config, rows = run.config, len(next(iter(batch.values())))
        if config.accumulate * self.world_size > 1:
            batch = self._with_batch_stats(run, batch)
        metrics: dict[str, Tensor] = {}
        edges = sorted({rows * i // config.accumulate for i in range(config.accumulate + 1)})
        for start, end in pairwise(edges):
            microbatch = {name: to_device(tensor[start:end], run.device) for name, tensor in batch.items()}
            weight = (end - start) / rows
            with self._microbatch(last=end == rows):
                with span("forward"), config.precision.autocast(run.device):
                    loss, values = run.wrapped(microbatch, run.step, run.generator)
                with span("backward"):
                    (loss * weight).backward()
            for name, value in {"loss": loss, **values}.items():
                metrics[name] = metrics.get(name, 0.0) + upcast(value.detach()) * weight
        return metrics

    def _with_batch_stats(self, run: GradientInputs, batch: Batch) -> Batch:
        """Add the values of the whole batch that the objective needs for a part of it."""
        shared = getattr(run.trainable.objective, "batch_stats", None)
        return {**batch, **{name: self.mean(value) for name, value in shared(batch).items()}} if shared else batch

    def _microbatch(self, last: bool) -> AbstractContextManager[object]:
        """Return a context manager for a micro-batch; `last` marks the last of an update."""
        return nullcontext()

    def unsharded(self) -> AbstractContextManager[object]:
        """Return a context manager in which all ranks together may call the model's methods. Outside of it weights may
        be sharded, and only a call of the module that `prepare` returned gathers them."""
        return nullcontext()

    def freeze(self, run: Any, depth: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Stop training the embedding and the first `depth` blocks of the model of a `TrainState`, and train all other
        parameters; depth 0 trains all. All ranks call it between two updates. `tensors` belong to parameters by name.
        Return those of the parameters that this rank holds afterwards.

        Raises `UserError` if the strategy cannot change which parameters train.
        """
        raise UserError(CANNOT_FREEZE)

    def layout_values(self, run: Any) -> dict[str, int]:
        """Return values for the log that describe what the ranks compute after `freeze`, by name."""
        return {}

    def grad_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return the norm of all gradients of the model together, [], equal on all ranks."""
        return self.reduction.grad_norm(parameters)

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average each gradient over ranks, unless the backward pass has done so, and divide it by its scale."""
        self.reduction.complete()


class _AllGatherWithGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, parallel: Parallel) -> Tensor:
        ctx.parallel, ctx.rows = parallel, len(values)
        return torch.cat(parallel.all_gather(values))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return ctx.parallel.sum(upstream[0])[ctx.parallel.rank * ctx.rows :][: ctx.rows], None


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy the tensor to the device; for CUDA from pinned memory and asynchronously."""
    pinned = device.type == "cuda" and tensor.device.type == "cpu"
    return tensor.pin_memory().to(device, non_blocking=True) if pinned else tensor.to(device)


class SingleProcess(Parallel):
    """The strategy of a single process."""

    rank, world_size = 0, 1
    can_freeze = True

    def prepare(self, trainable: Trainable, device: torch.device, dtype: torch.dtype) -> nn.Module:
        self.reduction = Reduction()
        return trainable.to(device)

    def sum(self, values: Tensor) -> Tensor:
        return values

    def all_gather(self, values: Tensor) -> list[Tensor]:
        return [values]

    def assert_replicas_equal(self, parameters: Iterable[nn.Parameter]) -> None:
        """Do nothing: there is one copy."""

    def freeze(self, run: Any, depth: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        for p in run.parameters:
            p.requires_grad_(True)
        for part in leading_part(run.model, depth):
            part.requires_grad_(False)
        return dict(tensors)
