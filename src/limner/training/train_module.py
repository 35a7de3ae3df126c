"""Model and objective as one module whose forward is the loss.

This module is what is sharded, compiled and wrapped. So a wrapper acts before and after the whole computation of the
loss, whichever of the model's methods the objective calls. Checkpoints hold the model's own names.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Batch = Mapping[str, Tensor]


class Objective(Protocol):
    """A scalar loss (mean over the batch) and detached scalars to log.

    An objective that is no mean over samples may have a method `shared(batch)`. It gives, by name, what parts of a
    batch (micro-batches, shares of processes) must know of the whole: a row per sample, such that the mean over equal
    shares is the value of the whole batch.

    One that compares samples with each other may have a method `across(join)`, which gives the objective of a process
    among several. `join` puts the rows of all processes together (`Parallel.join`).
    """

    def __call__(
        self, model: Any, batch: Any, step: int, generator: torch.Generator, /
    ) -> tuple[Tensor, Mapping[str, Tensor]]: ...


class Trainable(nn.Module):
    """`forward(batch, step, generator)` is the objective's loss of the model and its metrics."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, batch: Batch, step: int, generator: torch.Generator) -> tuple[Tensor, Mapping[str, Tensor]]:
        return self.objective(self.model, batch, step, generator)
