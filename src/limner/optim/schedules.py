"""How the learning rate, and any other annealed quantity, depends on the step.

Two kinds, kept apart because only one of them has memory:

- pure functions of the step: `warmup`, `cooldown`, `cosine`, and `Anneal`, a cosine with its end points as a
  config. The paper anneals the KL weight β, the relaxation temperature τ and the learning rate of the
  dVAE this way (appendix A.2);
- learning-rate schedules, `Constant | Cosine | Plateau`: configs whose `build(steps)` gives a
  `Schedule`, a factor on the base learning rate. `Plateau` watches the training loss and halves, as the
  paper did five times for the prior (B.2); what it has seen is part of the checkpoint.

Steps count from 0. The training loop multiplies `warmup * cooldown * schedule.factor(step)` with
the base learning rate.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from limner.validation import Checked, Range


def warmup(step: int, steps: int) -> float:
    """Linear ramp: `1/steps` at step 0, 1 from step `steps - 1` on. Constant 1 if `steps` is 0."""
    return min(1.0, (step + 1) / steps) if steps > 0 else 1.0


def cooldown(step: int, steps: int, last: int) -> float:
    """Linear descent over the `last` ones of `steps` updates, to `1/last` at the last one; constant 1 before, and if
    `last` is 0. With it a run may be ended at any time and loses little (Hägele et al. 2024)."""
    return min(1.0, max(0, steps - step) / last) if last > 0 else 1.0


def cosine(step: int, start: float, end: float, steps: int) -> float:
    """Half a cosine from `start` at step 0 to `end` at step `steps`, and `end` ever after."""
    progress = min(1.0, max(0, step) / steps) if steps > 0 else 1.0
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True, kw_only=True)
class Anneal(Checked):
    """A quantity that moves along a cosine: `Anneal(start=1, end=1/16, steps=n)`.

    Args:
        start, end: its first and its last value.
        steps: updates from the first to the last.
    """

    start: Annotated[float, Range(-(10**6), 10**6)]
    end: Annotated[float, Range(-(10**6), 10**6)]
    steps: Annotated[int, Range(0, 10**9)]

    def __call__(self, step: int) -> float:
        return cosine(step, self.start, self.end, self.steps)


class Schedule(Protocol):
    """A factor on the learning rate, which may react to the losses that it is shown."""

    def factor(self, step: int) -> float: ...

    def observe(self, loss: float) -> None:
        """Called once after every update with its training loss."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Constant:
    """The base learning rate throughout."""

    def build(self, steps: int) -> Schedule:
        return _Memoryless(Anneal(start=1.0, end=1.0, steps=steps))


@dataclass(frozen=True, kw_only=True)
class Cosine(Checked):
    """From the base learning rate to `end` times it, over `steps` updates or the whole run.

    The dVAE of the paper goes from 1e-4 to 1.25e-6, `end=1/80`, over 1,200,000 updates (A.2).

    Args:
        end: factor on the learning rate at the end.
        steps: updates until then; None is the whole run.
    """

    end: Annotated[float, Range(0, 10**6)] = 0.0
    steps: Annotated[int | None, Range(1, 10**9)] = None

    def build(self, steps: int) -> Schedule:
        return _Memoryless(Anneal(start=1.0, end=self.end, steps=steps if self.steps is None else self.steps))


@dataclass(frozen=True, kw_only=True)
class Plateau(Checked):
    """Halve the learning rate whenever the training loss stops falling.

    The mean loss of each `window` updates is compared with the best such mean so far. After
    `patience` windows in a row that fail to improve on it by the relative margin `threshold`, the
    factor halves and the count starts again; `halvings` times at most (five in the paper: 32 times
    smaller).

    Args:
        window: updates whose losses are averaged.
        patience: windows without improvement after which the factor halves.
        threshold: relative improvement that counts as one.
        halvings: at most.
    """

    window: Annotated[int, Range(1, 10**9)] = 500
    patience: Annotated[int, Range(1, 10**9)] = 2
    threshold: Annotated[float, Range(0, below=1)] = 1e-3
    halvings: Annotated[int, Range(0, 1_000)] = 5

    def build(self, steps: int) -> "HalveOnPlateau":
        return HalveOnPlateau(self)


class _Memoryless:
    def __init__(self, anneal: Anneal) -> None:
        self.factor = anneal.__call__

    def observe(self, loss: float) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class HalveOnPlateau:
    """The running `Plateau` schedule; all it remembers is six numbers."""

    def __init__(self, config: Plateau) -> None:
        self.config = config
        self.total, self.count = 0.0, 0  # of the window under way
        self.best: float | None = None
        self.stale = 0  # windows in a row without improvement
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
