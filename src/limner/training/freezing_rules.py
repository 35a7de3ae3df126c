"""Rules that decide how many leading blocks of a model are frozen (`training/freezing.py`).

A rule decides every few updates, from statistics of the updates since its last decision. Layer l is block l (the
embedding belongs to layer 0), and layer L, after the L blocks, is the rest of the model, the head.

A gradient is small in an untrained model too: from random weights, the smallest norm is that of the last block, so the
paper's rule freezes at full speed from its first decision. Hence no rule decides before the warm-up ends, and
`GuardedFreezing` requires that weights hardly move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from limner.validation import InvalidSetting, Range, Validated

__all__ = [
    "AnyFreezingRule", "FreezingRule", "GradientNormFreezing", "GuardedFreezing", "PercentileFreezing",
    "ScheduledFreezing", "WindowStatistics",
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

    def record(self, every: int) -> dict[str, Any]:
        """Return the settings that a resumed run may not change, with a decision after `every` updates."""
        return {"rule": type(self).__name__, "settings": self, "every": every}

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


AnyFreezingRule = GuardedFreezing | GradientNormFreezing | PercentileFreezing | ScheduledFreezing
