"""Spikes of a loss, and whether they were to be foreseen (Wortsman et al. 2023, Appendix E).

AdamW divides a gradient by the root of a running mean of its squares, u_t. Where the gradients of a tensor grow, that
mean is out of date: `RMS_t = sqrt(mean(g_t^2 / u_t))` rises far above 1, the update is too large by that factor, and a
few steps later the loss spikes.

Values are given one for each step, from step 1 on; spikes are numbers of steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

RMS = 2.3  # from which an RMS_t is a spike
DEVIATIONS = 3.2  # running standard deviations above the running mean, from which a loss is too high
IGNORED = 1_000  # first steps, with small learning rates; of a run of the paper's 20,000
TOGETHER = 10  # steps within which spikes are one
AFTER = (1, 8)  # steps after an RMS spike in which a loss spike follows it
_PAPER = 20_000
WINDOW = 100  # steps of the running mean; the paper does not say how many


def rms_spikes(rms: Float[np.ndarray, " T"]) -> list[int]:
    """The first of each group of steps with RMS_t at `RMS` or above, but for the run's beginning."""
    return _first(1 + np.flatnonzero(rms >= RMS), len(rms))


def loss_spikes(loss: Float[np.ndarray, " T"], window: int = WINDOW) -> list[int]:
    """The first of each group of two or more losses above the running mean by `DEVIATIONS`, but for the beginning.

    Mean and standard deviation are those of the `window` steps before, without those that were too high themselves,
    unless all were: then they are a new level. In a run of a few hundred steps the loss falls by much within 100, which
    a spike would have to exceed: a shorter window sees it.
    A loss that is not finite is too high.
    """
    high, calm, since = [], [], 0  # since: the last step that was not too high
    for step, value in enumerate(loss.tolist(), 1):
        if step - since > window:  # no spike, but a new level
            calm, since = [v for v in loss[since : step - 1].tolist() if math.isfinite(v)], step
        recent = calm[-window:]
        if len(recent) >= TOGETHER and not value <= np.mean(recent) + DEVIATIONS * np.std(recent):
            high.append(step)
        else:
            calm.append(value)
            since = step
    steps = np.array(high, int)
    several = [step for step in steps if ((steps >= step) & (steps < step + TOGETHER)).sum() > 1]
    return _first(np.array(several, int), len(loss))


def _first(steps: np.ndarray, total: int) -> list[int]:
    """The first of each group, after the steps that are ignored. A group is what lies within `TOGETHER` steps of its
    first one ("multiple spikes over a short time interval of 10 iterations are only counted as one"), and what goes on
    from there without a pause: one long spike."""
    ignored = IGNORED * min(1.0, total / _PAPER)
    found: list[int] = []
    first = last = -math.inf
    for step in steps.tolist():
        if step - first >= TOGETHER and step > last + 1:
            first = step
            found.append(step)
        last = step
    return [step for step in found if step > ignored]


@dataclass(frozen=True)
class Foreseen:
    """Which loss spikes came after an RMS spike.

    Attributes:
        loss, rms: the spikes.
        following: the loss spikes that follow an RMS spike by `AFTER` steps.
        covered: the share of all steps that follow one so: the chance that a loss spike at any step would.
    """

    loss: list[int]
    rms: list[int]
    following: list[int]
    covered: float

    @property
    def chance(self) -> float:
        """The probability that so many loss spikes or more follow, if they came at random steps."""
        n, k, p = len(self.loss), len(self.following), self.covered
        if p in (0, 1):
            return float(k == 0 or p)
        # In logarithms: the coefficients of a thousand spikes leave floating point.
        terms = [
            math.lgamma(n + 1)
            - math.lgamma(i + 1)
            - math.lgamma(n - i + 1)
            + i * math.log(p)
            + (n - i) * math.log1p(-p)
            for i in range(k, n + 1)
        ]  # fmt: skip
        return min(1.0, math.fsum(map(math.exp, terms)))


def foreseen(loss: Float[np.ndarray, " T"], rms: Float[np.ndarray, " T"], window: int = WINDOW) -> Foreseen:
    """Compare the spikes of a loss, found with `window`, with those of one tensor's RMS_t."""
    ours, theirs = loss_spikes(loss, window), rms_spikes(rms)
    first, last = AFTER
    after = {step + k for step in theirs for k in range(first, last + 1) if step + k <= len(loss)}
    return Foreseen(ours, theirs, [step for step in ours if step in after], len(after) / max(len(loss), 1))
