"""Freezing: blocks whose training has converged stop training, from the first one up (He et al. 2021, PipeTransformer).

A frozen part is the embedding and the blocks 0 ... k - 1. The backward pass ends at block k, and the optimizer skips
parameters without gradients. A rule of `freezing_rules.py` decides every few updates how many blocks are frozen. All
processes decide the same, because they exchange the statistics of the layers that each of them holds.

Every decision is an entry of "freezing" in the next row of `metrics.jsonl`: step, number of frozen blocks, and reason,
for a pipeline also the layout that follows from it (`Pipelined.freeze`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn

from limner.blocks import leading_part
from limner.optim.grad_access import total_norm
from limner.training.freezing_rules import FreezingRule, WindowStatistics
from limner.training.hooks import Hook
from limner.training.train_state import TrainState

__all__ = ["Freezing"]


class Freezing(Hook):
    """Freezes leading blocks of `run.model` by a rule, every `every` updates after the warm-up.

    Frozen parameters have `requires_grad` False. `score` maps the metrics of an evaluation to a number, lower is
    better, by which the rule may unfreeze the last frozen block. A decision may replace parameters (`Parallel.freeze`),
    so this hook comes after hooks that use those of the update.

    Attributes:
        level: number of frozen blocks, not rounded down.
        sums: sum of the gradient norms of each layer over `count` updates; between checkpoints, of the layers of this
            process.
        best: lowest score.
        decisions: decisions since the last row of metrics.
        weights: parameters of blocks and embedding at the start of the window, by name, if the rule needs them.

    Raises `UserError` if the model lacks `embed` and `blocks`, or the processes cannot freeze blocks.
    """

    saved = ("level", "sums", "count", "previous", "best", "decisions")

    def __init__(
        self, run: TrainState, rule: FreezingRule, every: int, score: Callable[[Mapping[str, float]], float]
    ) -> None:
        self.rule, self.every, self.score, self.model = rule, every, score, run.model
        self.trained = [name for name, p in run.model.named_parameters() if p.requires_grad]
        self.blocks = len(leading_part(run.model, sys.maxsize)) - 1
        self.level, self.best, self.decisions = 0.0, inf, list[dict[str, Any]]()
        self.latest: list[float] = []  # norms of the update in progress
        self.weights: dict[str, Tensor] = run.parallel.freeze(run, 0, {})
        self._begin_window([])

    @property
    def depth(self) -> int:
        """Number of frozen blocks."""
        return int(self.level)

    def layers(self) -> list[dict[str, nn.Parameter]]:
        """Return the parameters of each layer that this process holds, by name; layers 0 ... L."""
        layers: list[dict[str, nn.Parameter]] = [{} for _ in range(self.blocks + 1)]
        for name, p in self.model.named_parameters():
            part, *path = name.split(".")
            layer = int(path[0]) if part == "blocks" else 0 if part == "embed" else self.blocks
            if not p.is_meta:
                layers[layer][name] = p
        return layers

    def before_training(self, run: TrainState) -> None:
        self.weights = run.parallel.freeze(run, self.depth, self.weights)

    def before_step(self, run: TrainState) -> None:
        if self.rule.needs_updates and not self.weights:
            self.weights = {name: p.detach().clone() for layer in self.layers()[:-1] for name, p in layer.items()}

    def after_backward(self, run: TrainState) -> None:
        norms = [run.parallel.reduction.grad_norm(layer.values()).to(run.device) for layer in self.layers()]
        self.latest = torch.stack(norms).tolist()

    def after_update(self, run: TrainState) -> None:
        updates = run.step - run.config.warmup_steps
        if updates == 0:
            self._begin_window([])
        if updates <= 0:
            return
        if isfinite(run.loss) and isfinite(run.norm):
            self.sums = [total + norm for total, norm in zip(self.sums, self.latest, strict=True)]
            self.count += 1
        if updates % self.every == 0 and self.count:
            norms = [total / self.count for total in self._merge(run, self.sums)]
            progress = updates / (run.config.steps - run.config.warmup_steps)
            changes = self._merge(run, self._relative_updates())[:-1] if self.rule.needs_updates else []
            window = WindowStatistics(
                progress=progress, level=self.level, norms=norms, previous=self.previous, updates=changes
            )
            level, reason = self.rule.decide(window)
            self._set(run, float(level), reason)
            self._begin_window(norms)

    def after_eval(self, run: TrainState, metrics: Mapping[str, float]) -> None:
        if run.step <= run.config.warmup_steps:
            return
        score = float(run.parallel.mean(torch.tensor(self.score(metrics), dtype=torch.float64)))
        if self.depth and self.rule.unfreezes(score, self.best):
            self._set(run, self.depth - 1.0, f"the score rose from {self.best:.4g} to {score:.4g}")
            self._begin_window([])
        self.best = min(self.best, score)

    def before_log(self, run: TrainState, row: dict[str, Any]) -> None:
        row["frozen"] = self.depth
        if self.decisions:
            row["freezing"], self.decisions = self.decisions, []

    def before_save(self, run: TrainState) -> None:
        self.sums = self._merge(run, self.sums)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **{f"weights.{name}": x for name, x in self.weights.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        keys = (key for key in state if key.startswith("weights.") and not state[key].is_meta)
        self.weights = {key.removeprefix("weights."): state[key] for key in keys}

    def close(self) -> None:
        for name in self.trained:
            self.model.get_parameter(name).requires_grad_(True)

    def _set(self, run: TrainState, level: float, reason: str) -> None:
        self.level = level
        run.parallel.freeze(run, self.depth, {})
        layout = run.parallel.layout_values(run)
        self.decisions.append({"step": run.step, "frozen": self.depth, "reason": reason, **layout})

    def _begin_window(self, previous: list[float]) -> None:
        self.previous, self.sums, self.count, self.weights = previous, [0.0] * (self.blocks + 1), 0, {}

    def _merge(self, run: TrainState, values: Sequence[float]) -> list[float]:
        """Return the values of all layers from those of the layers that each process holds."""
        local = {str(i): value for i, (layer, value) in enumerate(zip(self.layers(), values, strict=True)) if layer}
        merged = run.parallel.merge(local)
        return [merged[str(i)] for i in range(len(values))]

    def _relative_updates(self) -> list[float]:
        """Return the relative change of the weights of each layer of this process; 0 for the head."""
        changes = []
        for layer in self.layers():
            pairs = [(p.detach(), self.weights[name].to(p.device)) for name, p in layer.items() if name in self.weights]
            moved, size = total_norm(p - start for p, start in pairs), total_norm(start for _, start in pairs)
            changes.append(float(moved / size.clamp_min(1e-30)))
        return changes
