"""Freezing: blocks whose training has converged stop training, from the first one up (He et al. 2021, PipeTransformer).

A frozen part is the embedding and the blocks 0 ... k - 1. The backward pass ends at block k, and the optimizer skips
parameters without gradients. A rule decides every few updates how many blocks are frozen, from statistics of
the updates since its last decision. Layer l is block l (the embedding belongs to layer 0), and layer L, after the L
blocks, is the rest of the model, the head.

A gradient is small in an untrained model too: from random weights, the smallest norm is that of the last block, so the
paper's rule freezes at full speed from its first decision. Hence no rule decides before the warm-up ends, and
`GuardedFreezing` requires that weights hardly move.

Every decision is an entry of "freezing" in the next row of `metrics.jsonl`: step, number of frozen blocks, and reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from limner.blocks import leading_part
from limner.errors import UserError
from limner.optim.grad_access import total_norm
from limner.training.hooks import Hook
from limner.training.train_state import TrainState
from limner.validation import InvalidSetting, Range, Validated

__all__ = [
    "Freezing", "FreezingRule", "GradientNormFreezing", "GuardedFreezing", "PercentileFreezing", "ScheduledFreezing",
    "WindowStatistics",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class WindowStatistics:
    """Statistics of the updates between two decisions.

    Attributes:
        progress: share of the updates after the warm-up that are done.
        level: number of frozen blocks before the decision, not rounded down.
        norms: mean norm of each layer's gradient, layers 0 ... L; 0 for frozen layers.
        previous: the same for the window before; empty if there was none with the same frozen blocks or fewer.
        updates: ||change of the weights|| / ||weights|| of each block over the window; empty unless the rule
            `needs_updates`.
    """

    progress: float
    level: float
    norms: Sequence[float]
    previous: Sequence[float] = ()
    updates: Sequence[float] = ()

    @property
    def frozen(self) -> int:
        """Number of frozen blocks."""
        return int(self.level)

    @property
    def blocks(self) -> int:
        """L, the number of blocks."""
        return len(self.norms) - 1


class FreezingRule(Validated):
    """Base class of rules. `needs_updates`: the rule reads the relative updates, for which the weights are copied."""

    needs_updates: ClassVar[bool] = False

    def decide(self, window: WindowStatistics) -> tuple[float, str]:
        """Return the new level, whose integer part is at least that of the old one, and the reason."""
        raise NotImplementedError

    def unfreezes(self, score: float, best: float) -> bool:
        """Return True if the last frozen block must train again, after an evaluation with this score, lower is better;
        `best` is the lowest of all evaluations since the warm-up."""
        return False


@dataclass(frozen=True, kw_only=True)
class GradientNormFreezing(FreezingRule):
    """The rule of PipeTransformer: freeze the layers below the one with the smallest gradient, at a limited speed.

        F(T) = min(F(T-1) + alpha (L - F(T-1)), argmin over l in {F(T-1), ..., L} of ||g_l||)

    F(T), L_frozen in the paper, is a real number, whose integer part is the number of frozen blocks.

    Args:
        alpha: largest share of the layers not yet frozen that a decision freezes.
    """

    alpha: Annotated[float, Range(gt=0, lt=1)] = 1 / 3

    def decide(self, window: WindowStatistics) -> tuple[float, str]:
        limit = window.level + self.alpha * (window.blocks - window.level)
        smallest = min(range(window.frozen, window.blocks + 1), key=lambda layer: window.norms[layer])
        return min(limit, smallest), f"smallest gradient: layer {smallest}, limit {limit:.2f}"


@dataclass(frozen=True, kw_only=True)
class PercentileFreezing(FreezingRule):
    """The rule of AutoFreeze (Liu et al. 2021): freeze leading blocks whose gradient norms change least.

        change_l = | ||g_l||(T-1) - ||g_l||(T) | / ||g_l||(T-1)

    The blocks from the first trained one up to the first whose change is not below the percentile of all trained blocks
    freeze. AutoFreeze takes norms of summed gradients, which needs a copy of the gradients; here they are mean norms.

    Args:
        percentile: percentile of the changes.
    """

    percentile: Annotated[float, Range(0, 100)] = 50.0

    def decide(self, window: WindowStatistics) -> tuple[float, str]:
        if not window.previous:
            return window.level, "no window to compare with"
        trained = range(window.frozen, window.blocks)
        changes = [abs(window.previous[i] - window.norms[i]) / max(window.previous[i], 1e-30) for i in trained]
        bound = float(np.percentile(changes, self.percentile)) if changes else 0.0
        count = next((i for i, change in enumerate(changes) if change >= bound), len(changes))
        return max(window.level, window.frozen + count), f"changes of {count} leading norms are below {bound:.3g}"


@dataclass(frozen=True, kw_only=True)
class ScheduledFreezing(FreezingRule):
    """Freeze a share of the blocks at a fixed time, evenly between two points of the run.

    Args:
        share: share of the blocks that are frozen at the end.
        start, end: first and last point, as shares of the updates after the warm-up.
    """

    share: Annotated[float, Range(0, 1)] = 0.5
    start: Annotated[float, Range(0, 1)] = 0.0
    end: Annotated[float, Range(0, 1)] = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.end < self.start:
            raise InvalidSetting("end", f"must be at least start, {self.start}, not {self.end}")

    def decide(self, window: WindowStatistics) -> tuple[float, str]:
        if window.progress < self.start:
            return window.level, "before the start of the schedule"
        done = min(1.0, (window.progress - self.start) / (self.end - self.start)) if self.end > self.start else 1.0
        level = done * self.share * window.blocks + 1e-9  # share * blocks may be rounded down
        return max(window.level, level), f"schedule at {done:.0%}"


@dataclass(frozen=True, kw_only=True)
class GuardedFreezing(FreezingRule):
    """Freeze leading blocks that have converged, and unfreeze the last one when an evaluation worsens.

    A block has converged if its weights changed little in the window and its gradient norm has stopped falling. The
    last block never freezes.

    Args:
        max_update: largest relative change of a block's weights over a window.
        min_fall: relative fall of the gradient norm since the window before, from which on it counts as falling.
        tolerance: relative rise of the score above the best one at which a block is unfrozen.
    """

    needs_updates: ClassVar[bool] = True
    max_update: Annotated[float, Range(gt=0)] = 1e-2
    min_fall: Annotated[float, Range(0, lt=1)] = 0.1
    tolerance: Annotated[float, Range(0)] = 0.02

    def decide(self, window: WindowStatistics) -> tuple[float, str]:
        if not window.previous:
            return window.level, "no window to compare with"
        for layer in range(window.frozen, window.blocks - 1):
            if window.updates[layer] > self.max_update:
                return layer, f"the weights of block {layer} changed by {window.updates[layer]:.2g}"
            if window.norms[layer] < (1 - self.min_fall) * window.previous[layer]:
                fall = 1 - window.norms[layer] / window.previous[layer]
                return layer, f"the gradient norm of block {layer} fell by {fall:.0%}"
        return max(window.frozen, window.blocks - 1), "all blocks but the last have converged"

    def unfreezes(self, score: float, best: float) -> bool:
        return score > best + self.tolerance * abs(best)


class Freezing(Hook):
    """Freezes leading blocks of `run.model` by a rule, every `every` updates after the warm-up.

    Frozen parameters have `requires_grad` False. `score` maps the metrics of an evaluation to a number, lower is
    better, by which the rule may unfreeze the last frozen block.

    Attributes:
        level: number of frozen blocks, not rounded down.
        sums: sum of the gradient norms of each layer over `count` updates.
        best: lowest score.
        decisions: decisions since the last row of metrics.
        weights: parameters of all blocks and the embedding at the start of the window, if the rule needs them.

    Raises `UserError` if the model lacks `embed` and `blocks`, or several processes train.
    """

    saved = ("level", "sums", "count", "previous", "best", "decisions", "weights")

    def __init__(
        self, run: TrainState, rule: FreezingRule, every: int, score: Callable[[Mapping[str, float]], float]
    ) -> None:
        if run.parallel.world_size > 1:
            raise UserError("blocks can be frozen in one process only: start the command without torchrun")
        self.rule, self.every, self.score = rule, every, score
        embed, *blocks = leading_part(run.model, sys.maxsize)
        trained = [p for p in run.model.parameters() if p.requires_grad]
        parts = [{*embed.parameters(), *blocks[0].parameters()}, *({*block.parameters()} for block in blocks[1:])]
        parts.append({*trained}.difference(*parts))
        self.layers = [[p for p in trained if p in part] for part in parts]
        self.level, self.best, self.decisions = 0.0, inf, list[dict[str, Any]]()
        self.latest: list[float] = []  # norms of the update in progress
        self.weights = torch.empty(0)
        self._begin_window([])

    @property
    def depth(self) -> int:
        """Number of frozen blocks."""
        return int(self.level)

    def before_step(self, run: TrainState) -> None:
        for layer, parameters in enumerate(self.layers):
            for p in parameters:
                p.requires_grad_(layer >= self.depth)

    def after_backward(self, run: TrainState) -> None:
        active = ([p.grad for p in layer if p.grad is not None] for layer in self.layers)
        norms = [total_norm(grads) if grads else torch.zeros((), device=run.device) for grads in active]
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
            norms, changes = [total / self.count for total in self.sums], self._relative_updates()
            progress = updates / (run.config.steps - run.config.warmup_steps)
            window = WindowStatistics(
                progress=progress, level=self.level, norms=norms, previous=self.previous, updates=changes
            )
            level, reason = self.rule.decide(window)
            self._set(run, float(level), reason)
            self._begin_window(norms)

    def after_eval(self, run: TrainState, metrics: Mapping[str, float]) -> None:
        if run.step <= run.config.warmup_steps:
            return
        score = self.score(metrics)
        if self.depth and self.rule.unfreezes(score, self.best):
            self._set(run, self.depth - 1.0, f"the score rose from {self.best:.4g} to {score:.4g}")
            self._begin_window([])
        self.best = min(self.best, score)

    def before_log(self, run: TrainState, row: dict[str, Any]) -> None:
        row["frozen"] = self.depth
        if self.decisions:
            row["freezing"], self.decisions = self.decisions, []

    def close(self) -> None:
        for p in (p for layer in self.layers for p in layer):
            p.requires_grad_(True)

    def _set(self, run: TrainState, level: float, reason: str) -> None:
        self.level = level
        self.decisions.append({"step": run.step, "frozen": self.depth, "reason": reason})

    def _begin_window(self, previous: list[float]) -> None:
        self.previous, self.sums, self.count = previous, [0.0] * len(self.layers), 0
        if self.rule.needs_updates:
            self.weights = self._weights().clone()

    def _weights(self) -> Tensor:
        return parameters_to_vector(p for layer in self.layers[:-1] for p in layer).detach()

    def _relative_updates(self) -> list[float]:
        if not self.rule.needs_updates:
            return []
        sizes = [sum(p.numel() for p in layer) for layer in self.layers[:-1]]
        now, before = self._weights().split(sizes), self.weights.split(sizes)
        return [float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in zip(now, before, strict=True)]
