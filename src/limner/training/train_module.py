"""Model and objective as one module whose forward is the loss.

Strategies shard and wrap this module. A wrapper thus acts before and after the whole computation of the loss, for any
method of the model that the objective calls. Checkpoints hold the model's own parameter names.
"""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

__all__ = ["Objective", "StagedObjective", "Trainable", "frozen_output"]

Batch = Mapping[str, Tensor]


class Objective(Protocol):
    """A scalar loss (mean over the batch) and detached scalars to log.

    An objective that is not a mean over samples may have a method `batch_stats(batch)`. It returns, by name, values of
    the whole batch that its parts (micro-batches, shares of processes) need: a row per sample, such that the mean over
    equal shares is the value of the whole batch.

    An objective that stops training some parameters shows from which step, as `freeze_encoder_from`.

    An objective of a model that may be cut into pipeline stages has two more methods (`StagedObjective`).

    An objective that compares samples may have a method `gathered(all_gather)`, which returns the objective for one of
    several processes. `all_gather` concatenates the rows of all processes (`Parallel.all_gather_with_grad`).
    """

    def __call__(
        self, model: Any, batch: Any, step: int, generator: torch.Generator, /
    ) -> tuple[Tensor, Mapping[str, Tensor]]: ...


@runtime_checkable
class StagedObjective(Protocol):
    """An objective whose model may be cut between its `blocks`, of which `model.run(x, start, stop)` computes a range.
    The model's module `embed` computes the input of the first block. All other modules are used after the last block.
    """

    def inputs(self, model: Any, batch: Any, /) -> Tensor:
        """Return the input of the first block, [B, ...]; the output of each block has the same shape and format."""
        ...

    def loss(self, model: Any, batch: Any, x: Tensor, /) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return loss and metrics, as the objective itself does, from the output of the last block."""
        ...


def frozen_output(objective: Any, model: Any, batch: Any, depth: int) -> Tensor:
    """Return the output of the first `depth` blocks, from the cache of an objective that has one (`auto_cache.py`)."""
    if cached := getattr(objective, "frozen_output", None):
        return cached(model, batch, depth)
    return model.run(objective.inputs(model, batch), 0, depth)


class Trainable(nn.Module):
    """A module whose `forward(batch, step, generator)` returns the objective's loss and metrics. `may_freeze`: some
    parameters may stop having gradients during the run."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective
        self.may_freeze = getattr(objective, "freeze_encoder_from", None) is not None

    def forward(self, batch: Batch, step: int, generator: torch.Generator) -> tuple[Tensor, Mapping[str, Tensor]]:
        return self.objective(self.model, batch, step, generator)
