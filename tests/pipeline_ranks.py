"""A small prior that the processes of a pipeline train in tests, its batches, and schedules of layouts."""

import json
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from limner.blocks import leading_part
from limner.data.stream import Stream
from limner.distributed.pipeline import Pipelined
from limner.distributed.pipeline_layout import PipelineLayout
from limner.evaluation.validation import held_out_metrics
from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Fp32
from limner.objectives.autoregressive import Autoregressive
from limner.optim.optimizers import AdamWConfig
from limner.runs.monitors import RMSMonitor
from limner.training.auto_cache import AutoCache
from limner.training.checkpoint import completed
from limner.training.config import TrainConfig
from limner.training.freezing import Freezing
from limner.training.freezing_rules import FreezingRule, WindowStatistics
from limner.training.hooks import Hook
from limner.training.loop import train
from limner.training.metrics_log import read_metrics
from limner.training.parallel import Parallel
from limner.training.train_state import TrainState
from shard_ranks import Tokens

PRIOR = TransformerConfig(
    text_vocab=20, image_vocab=8, text_len=8, grid=(3, 3), width=16, depth=8, heads=2, kernel=3, pattern="dense"
)
CONFIG = TrainConfig(
    steps=6, batch_size=16, optimizer=AdamWConfig(lr=1e-2), clip_norm=0.5, precision=Fp32(), ema_decay=0.9,
    log_every=1, checkpoint_every=3, eval_every=3,
)  # fmt: skip
SHRINKING = {
    0: PipelineLayout(stages=4),
    2: PipelineLayout(stages=2, replicas=2, frozen=3),
    4: PipelineLayout(stages=1, replicas=4, frozen=5),
}
GROWING = {
    0: PipelineLayout(stages=1, replicas=4, frozen=5),
    2: PipelineLayout(stages=2, replicas=2, chunks=2),
    4: PipelineLayout(stages=4),
}


class Layouts(Hook):
    """Changes the layout after the given steps; one process freezes the same part of the model."""

    def __init__(self, layouts: dict[int, PipelineLayout]) -> None:
        self.layouts, self.cpu_seconds = layouts, list[float]()

    def before_training(self, run: TrainState) -> None:
        if past := [step for step in self.layouts if step <= run.step]:
            self.change(run, self.layouts[max(past)])

    def after_update(self, run: TrainState) -> None:
        if run.step in self.layouts:
            self.change(run, self.layouts[run.step])

    def change(self, run: TrainState, layout: PipelineLayout) -> None:
        if isinstance(run.parallel, Pipelined):
            before = time.process_time()
            run.parallel.relayout(run, layout)
            self.cpu_seconds.append(time.process_time() - before)
            return
        run.model.requires_grad_(True)
        for part in leading_part(run.model, layout.frozen):
            part.requires_grad_(False)


@dataclass(frozen=True, kw_only=True)
class Planned(FreezingRule):
    """Freezes 7 blocks in the first half of the run, 11 in the second, and unfreezes one at the first evaluation. The
    reason holds all statistics."""

    needs_updates = True

    def decide(self, window: WindowStatistics) -> tuple[float, str]:
        return float(7 if window.progress < 0.5 else 11), json.dumps([*window.norms, *window.previous, *window.updates])

    def unfreezes(self, score: float, best: float) -> bool:
        return best == inf


class KilledInTransition(Pipelined):
    """Kills the last rank before, during or after the transition that follows the fourth update, when the checkpoint
    before it is on the disk. During it, this rank has received its tensors, and the others wait for new groups."""

    def __init__(self, layout: PipelineLayout, out: Path, moment: str) -> None:
        super().__init__(layout)
        self.out, self.moment, self.updates = out, moment, 0

    def die(self, moment: str) -> None:
        if self.updates == 4 and self.rank == self.world_size - 1 and self.moment == moment:
            while not completed(self.out):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        super().reduce(parameters)
        self.updates += 1
        self.die("before")

    def _destroy_groups(self) -> None:
        self.die("during")
        super()._destroy_groups()

    def relayout(self, *arguments: Any) -> dict[str, Tensor]:
        moved = super().relayout(*arguments)
        self.die("after")
        return moved


def batch(step: int, parallel: Parallel) -> dict[str, Tensor]:
    """This process's share of the batch of a step."""
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(-1, 20, (16, 8), generator=generator)
    image = torch.randint(0, 8, (16, 9), generator=generator)
    share = parallel.layout.replica(parallel.rank) if isinstance(parallel, Pipelined) else parallel.rank
    return {name: x.chunk(parallel.data_shares)[share] for name, x in {"text": text, "image": image}.items()}


def begin(parallel: Parallel, dtype: torch.dtype = torch.float32, depth: int = 8, **settings: Any) -> TrainState:
    torch.manual_seed(0)
    model = replace(PRIOR, depth=depth).build().to(dtype)
    return TrainState(model, Autoregressive(), replace(CONFIG, **settings), parallel=parallel)


def train_in(out: Path, parallel: Parallel | PipelineLayout, hook: Hook, steps: int = CONFIG.steps) -> None:
    """Train up to `steps` in a folder, with an evaluation on some of the samples."""
    if isinstance(parallel, PipelineLayout):
        parallel = Pipelined(parallel)
    _train(begin(parallel, steps=steps), out, hook)


def freeze_in(
    out: Path, parallel: Parallel | PipelineLayout, rule: FreezingRule, steps: int = CONFIG.steps, cached: bool = False
) -> None:
    """Train a prior of 12 blocks that a rule freezes. `steps` ends the run early. With `cached`, processes read the
    output of frozen blocks from one file."""
    if isinstance(parallel, PipelineLayout):
        parallel = Pipelined(parallel)
    run = begin(parallel, depth=12)
    hooks: list[Hook] = [freezing := Freezing(run, rule, 2, lambda metrics: metrics["image"])]
    times = iter([1.0, 2.0] * 100)  # reading is faster than computing
    with mock.patch("limner.training.auto_cache._fastest", lambda work: work() is not None and next(times)):
        hooks += [AutoCache(run, freezing, out / "cache", 1 << 24, [])] if cached else []
        _train(run, out, *hooks, Until(steps), data=Repeated() if cached else None)


class Until(Hook):
    """Ends a run early."""

    def __init__(self, steps: int) -> None:
        self.steps, self.ended = steps, False

    def after_update(self, run: TrainState) -> None:
        self.ended = run.step >= self.steps

    @property
    def done(self) -> bool:
        return self.ended


class Repeated(Tokens):
    """Samples that are the same in each epoch."""

    def batch(self, indices: np.ndarray, seeds: np.ndarray) -> dict[str, Tensor]:
        return super().batch(indices, indices)


def _train(run: TrainState, out: Path, *hooks: Hook, data: Tokens | None = None) -> None:
    stream = Stream(data or Tokens(), 16, seed=3, prefetch=1)
    evaluate = held_out_metrics(Autoregressive(), Tokens(), 32, torch.device("cpu"))
    try:
        train(run, stream, out, hooks=[RMSMonitor(out), *hooks], evaluate=evaluate)
    finally:
        stream.close()


def losses(out: Path) -> list[float]:
    return [row[name] for row in read_metrics(out / "metrics.jsonl") for name in row if name in ("loss", "eval/text")]
