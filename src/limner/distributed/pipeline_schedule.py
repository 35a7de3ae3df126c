"""Forward and backward of a batch by the stages of a pipeline, on `torch.distributed.pipelining`.

    stage 0    F0 F1 F2       B0 F3 B1    B2 ...       F: forward of a micro-batch, B: its backward
    stage 1       F0 F1 B0 F2 B1 F3 B2 ...             (1F1B, two stages)

Frozen blocks are outside the schedule: the first stage computes their output for the whole batch, without gradients.
The first trained part of the model is therefore always the first part of the pipeline. torch's zero-bubble schedules
would lose the gradients of a trained part after a frozen one without an error, and are not offered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from limner.distributed.pipeline_layout import MAX_MICROBATCHES_PER_STAGE, PipelineLayout
from limner.errors import UserError
from limner.numerics.precision import upcast
from limner.spans import span
from limner.training.parallel import GradientInputs, Reduction
from limner.training.train_module import Batch, frozen_output

Order = Literal["gpipe", "1f1b"]
ORDERS = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}

MIN_MICROBATCHES_PER_STAGE = 2  # if the batch allows: more shorten the bubble, (K - 1) / (M + K - 1) of the time


def count_microbatches(rows: int, layout: PipelineLayout, least: int) -> int:
    """Return M, the number of micro-batches of equal size into which a pipeline divides its rows: a multiple of K, and
    at least `least` if the rows allow. Raises `UserError` if K does not divide the rows."""
    stages, choices = layout.stages, _microbatch_counts(rows, layout)
    least = max(least, MIN_MICROBATCHES_PER_STAGE * stages if stages > 1 else 1)
    return next((m for m in choices if m >= least), choices[-1])


def microbatch_candidates(rows: int, layout: PipelineLayout, least: int) -> list[int]:
    """Return each M from K to 6 K that a search tries, by the rules of `count_microbatches`. A single stage does not
    wait, so it has one candidate."""
    most = MAX_MICROBATCHES_PER_STAGE * layout.stages if layout.stages > 1 else 0
    candidates = [m for m in _microbatch_counts(rows, layout) if least <= m <= most]
    return candidates or [count_microbatches(rows, layout, least)]


def _microbatch_counts(rows: int, layout: PipelineLayout) -> list[int]:
    """Return the multiples of K that divide the rows."""
    stages = layout.stages
    if rows % stages:
        raise UserError(
            f"{rows} samples cannot be divided among {stages} pipeline stages: choose a batch_size that is a multiple "
            f"of {layout.world_size}"
        )
    return [stages * n for n in range(1, rows // stages + 1) if (rows // stages) % n == 0]


class ScheduleRunner:
    """The schedule of this process for batches of `rows` samples.

    Args:
        run: the run, whose model has the parameters of this process's parts.
        microbatches: M, which divides the rows.
        group: processes of the pipeline, by stage.
        reduction: averages gradients over replicas; `last` marks the last backward pass of each part.
    """

    def __init__(
        self, run: GradientInputs, rows: int, microbatches: int, layout: PipelineLayout, order: Order, group: Any,
        reduction: Reduction,
    ) -> None:  # fmt: skip
        self.run, self.rows, self.microbatches, self.layout, self.group = run, rows, microbatches, layout, group
        self.model: Any = run.trainable.model
        self.objective: Any = run.trainable.objective
        self._pieces = layout.chunk_blocks(self.model)
        self._stage = group.rank()
        self._values: list[Mapping[str, Tensor]] = []  # metrics of micro-batches, on the last stage
        self._metrics: tuple[list[str], torch.dtype] | None = None  # names and format, once known
        self._reduction, self._order = reduction, order
        self._schedule: Any = None

    @property
    def is_last(self) -> bool:
        return self._stage == self.layout.stages - 1

    def gradients(self, batch: Batch) -> dict[str, Tensor]:
        """Add the gradients of a batch on the device; return the metrics, equal on all processes of the pipeline."""
        if self._schedule is None:
            self._schedule = self._build(batch)
        inputs = [self._frozen_output(batch)] if self.layout.frozen and self._stage == 0 else []
        losses: list[Tensor] = []
        target = torch.empty(self.microbatches) if self.is_last else None  # part of torch's interface, unused
        self._values.clear()
        self._schedule.step(*inputs, target=target, losses=losses, return_outputs=False, **batch)
        return self._share_metrics(losses)

    def _autocast(self) -> AbstractContextManager[object]:
        """Return the context of the model's operations. Blocks with gradient scales enter their own, in fp32."""
        if self.run.config.scaling == "none":
            return self.run.config.precision.autocast(self.run.device)
        return torch.autocast(self.run.device.type, enabled=False)

    @torch.no_grad()
    def _frozen_output(self, batch: Batch) -> Tensor:
        with span("forward"), self._autocast():
            return frozen_output(self.objective, self.model, batch, self.layout.frozen)

    def _share_metrics(self, losses: list[Tensor]) -> dict[str, Tensor]:
        """Return the metrics of the last stage on all stages."""
        metrics: dict[str, Tensor] = {}
        if self.is_last:
            metrics["loss"] = upcast(torch.stack(losses).detach()).sum()
            for name in self._values[0]:
                metrics[name] = upcast(torch.stack([values[name] for values in self._values])).mean()
            metrics["microbatches"] = metrics["loss"].new_tensor(self.microbatches)
        last = {"group": self.group, "group_src": self.layout.stages - 1}
        if self._metrics is None:
            described = [(list(metrics), metrics["loss"].dtype) if self.is_last else None]
            distributed.broadcast_object_list(described, **last)
            self._metrics = described[0]
        assert self._metrics is not None
        names, dtype = self._metrics
        values = torch.empty(len(names), dtype=dtype, device=self.run.device)
        if self.is_last:
            values = torch.stack([metrics[name].to(dtype) for name in names])
        distributed.broadcast(values, **last)
        return dict(zip(names, values, strict=True))

    def _build(self, batch: Batch) -> ScheduleGPipe | Schedule1F1B | ScheduleInterleaved1F1B:
        state = self._example_state(batch)
        pieces = range(self._stage, len(self._pieces), self.layout.stages)
        stages: list[Any] = [self._make_stage(piece, state) for piece in pieces]
        settings: dict[str, Any] = {
            "n_microbatches": self.microbatches, "loss_fn": lambda loss, _: loss / self.microbatches,
            "scale_grads": False,
        }  # fmt: skip
        if len(self._pieces) > self.layout.stages:
            return ScheduleInterleaved1F1B(stages, **settings)
        return ORDERS[self._order](stages[0], **settings)

    def _make_stage(self, piece: int, state: Tensor) -> PipelineStage:
        first, last = piece == 0, piece == len(self._pieces) - 1
        inputs = () if first and not self.layout.frozen else state
        output = state.new_empty((), requires_grad=True) if last else state
        module = _Piece(partial(self._compute, self._pieces[piece], last))
        return _ReducedStage(
            self._reduction, module, piece, len(self._pieces), self.run.device, inputs, output, group=self.group
        )

    @torch.no_grad()
    def _example_state(self, batch: Batch) -> Tensor:
        """Return a tensor without values that describes the input of a block for one micro-batch."""
        rows = self.rows // self.microbatches
        first = next(self.model.parameters()).device  # meta unless this process has the first stage
        with self._autocast():
            x = self.objective.inputs(self.model, {name: x[:rows].to(first) for name, x in batch.items()})
        return torch.empty_like(x, device="meta", requires_grad=True)

    def _compute(self, blocks: range, last: bool, *inputs: Tensor, **batch: Tensor) -> Tensor:
        """Return the output of a piece for one micro-batch; the last piece returns the loss."""
        with span("forward"), self._autocast():
            x = inputs[0] if inputs else self.objective.inputs(self.model, batch)
            x = self.model.run(x, blocks.start, blocks.stop)
            if not last:
                return x
            loss, values = self.objective.loss(self.model, batch, x)
        self._values.append({name: value.detach() for name, value in values.items()})
        return loss


class _Piece(nn.Module):
    """A piece of a model as torch's stages take it; its parameters stay those of the model."""

    def __init__(self, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, *inputs: Tensor, **batch: Tensor) -> Tensor:
        return self.compute(*inputs, **batch)


class _ReducedStage(PipelineStage):
    """A stage that marks its last backward pass of a batch for the reduction over replicas."""

    def __init__(self, reduction: Reduction, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._reduction = reduction

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False):
        self._reduction.last = last_backward
        with span("backward"):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
