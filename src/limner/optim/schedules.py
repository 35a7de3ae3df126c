"""Learning-rate schedules and other annealed quantities.

Two kinds, separate because only one has state:

- Pure functions of the step: `warmup`, `cooldown`, `cosine`, and `Anneal`, a cosine as a config. The paper anneals the
  KL weight β, the relaxation temperature τ and the learning rate of the dVAE with it (A.2).
- Configs `Constant | Cosine | MultiStep | Plateau`, whose `build(steps)` returns a `Schedule`. `Plateau` halves the
  factor when the training loss stops falling, as the paper did five times for the prior (B.2). Checkpoints contain its
  state.

Steps count from 0, those of a `Schedule` from the end of the warm-up: the learning rate rises to its base value, then
the schedule begins (Wortsman et al. 2023, §3.2). The training loop multiplies the base learning rate by
`warmup * cooldown * schedule.factor(step - warmup_steps)`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from limner.validation import Range, Validated

__all__ = [
    "Anneal", "Constant", "Cosine", "HalveOnPlateau", "MultiStep", "Plateau", "Schedule", "cooldown", "cosine",
    "warmup",
]  # fmt: skip


def warmup(step: int, steps: int) -> float:
    """Linear ramp: `1/steps` at step 0, 1 from step `steps - 1` on. Constant 1 if `steps` is 0."""
    return min(1.0, (step + 1) / steps) if steps > 0 else 1.0


def cooldown(step: int, steps: int, last: int) -> float:
    """Linear descent from 1 over the last `last` of `steps` updates, to `1/last` at the final one. Constant 1 if `last`
    is 0. A run that ends early with a cooldown loses little (Hägele et al. 2024)."""
    return min(1.0, max(0, steps - step) / last) if last > 0 else 1.0


def cosine(step: int, start: float, end: float, steps: int) -> float:
    """Half a cosine from `start` at step 0 to `end` at step `steps`, then constant."""
    progress = min(1.0, max(0, step) / steps) if steps > 0 else 1.0
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True, kw_only=True)
class Anneal(Validated):
    """A quantity annealed along a cosine: `Anneal(start=1, end=1/16, steps=n)`.

    Args:
        start, end: first and last value.
        steps: updates from the first to the last value.
    """

    start: Annotated[float, Range(-(10**6), 10**6)]
    end: Annotated[float, Range(-(10**6), 10**6)]
    steps: Annotated[int, Range(0, 10**9)]

    def __call__(self, step: int) -> float:
        return cosine(step, self.start, self.end, self.steps)


class Schedule:
    """A factor on the learning rate by step. Subclasses may depend on training losses; their state is JSON values."""

    def __init__(self, factor: Callable[[int], float]) -> None:
        self._factor = factor

    def factor(self, step: int) -> float:
        """Return the factor of a step after the warm-up; steps before it are negative."""
        return self._factor(step)

    def observe(self, loss: float) -> None:
        """Record a training loss; called once after every update."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""


@dataclass(frozen=True, kw_only=True)
class Constant:
    """Constant learning rate."""

    def build(self, steps: int) -> Schedule:
        return Schedule(lambda step: 1.0)


@dataclass(frozen=True, kw_only=True)
class Cosine(Validated):
    """Cosine from the base learning rate to `end` times it, over `steps` updates after the warm-up, or all of them.

    The paper's dVAE anneals from 1e-4 to 1.25e-6 over 1,200,000 updates (A.2): `end=1/80`.

    Args:
        end: factor on the learning rate after `steps` updates.
        steps: updates after the warm-up until the factor is `end`; None for the rest of the run.
    """

    end: Annotated[float, Range(0, 10**6)] = 0.0
    steps: Annotated[int | None, Range(1, 10**9)] = None

    def build(self, steps: int) -> Schedule:
        return Schedule(Anneal(start=1.0, end=self.end, steps=steps if self.steps is None else self.steps))


@dataclass(frozen=True, kw_only=True)
class MultiStep(Validated):
    """Multiply the learning rate by `gamma` at two points of the run, as SSD300 does after 80 and 110 of 120 epochs.

    Args:
        milestones: shares of the updates after the warm-up.
        gamma: factor at each milestone.
    """

    milestones: Annotated[tuple[float, float], Range(0, 1)] = (2 / 3, 11 / 12)
    gamma: Annotated[float, Range(0, 1)] = 0.1

    def build(self, steps: int) -> Schedule:
        return Schedule(lambda step: self.gamma ** sum(step >= share * steps for share in self.milestones))


@dataclass(frozen=True, kw_only=True)
class Plateau(Validated):
    """Halve the learning rate whenever the training loss stops falling.

    The schedule compares the mean loss of each `window` updates with the best mean so far. After `patience` windows in
    a row that do not improve on it by the relative margin `threshold`, the factor halves and counting restarts, at most
    `halvings` times (five in the paper: 32 times smaller).

    Args:
        window: updates whose losses are averaged.
        patience: windows without improvement before the factor halves.
        threshold: smallest relative improvement that counts.
        halvings: maximal number of halvings.
    """

    window: Annotated[int, Range(1, 10**9)] = 500
    patience: Annotated[int, Range(1, 10**9)] = 2
    threshold: Annotated[float, Range(0, lt=1)] = 1e-3
    halvings: Annotated[int, Range(0, 1_000)] = 5

    def build(self, steps: int) -> "HalveOnPlateau":
        return HalveOnPlateau(self)


class HalveOnPlateau(Schedule):
    """State of a `Plateau` schedule."""

    def __init__(self, config: Plateau) -> None:
        self.config = config
        self.total, self.count = 0.0, 0  # sum and number of losses in the current window
        self.best: float | None = None
        self.stale = 0  # successive windows without improvement
        self.halved = 0

    def factor(self, step: int) -> float:
        return 0.5**self.halved

    def observe(self, loss: float) -> None:
        self.total, self.count = self.total + loss, self.count + 1
        if self.count < self.config.window:
            return
        mean, self.total, self.count = self.total / self.count, 0.0, 0
        if self.best is None or mean < self.best - self.config.threshold * abs(self.best):
            self.best, self.stale = mean, 0
            return
        self.stale += 1
        if self.stale >= self.config.patience and self.halved < self.config.halvings:
            self.halved, self.stale = self.halved + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "config"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.total, self.best = float(state["total"]), None if state["best"] is None else float(state["best"])
        self.count, self.stale, self.halved = (int(state[name]) for name in ("count", "stale", "halved"))
