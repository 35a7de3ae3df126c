"""Spikes of a loss, and whether RMS spikes precede them (Wortsman et al. 2023, Appendix E).

AdamW divides a gradient by the root of a running mean of its squares, u_t. Where the gradients of a tensor grow, that
mean is out of date: `RMS_t = sqrt(mean(g_t^2 / u_t))` rises far above 1, the update is too large by that factor, and a
few steps later the loss spikes.

Arrays have one value for each step, starting with step 1. Spikes are step numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

__all__ = ["SpikeMatch", "loss_spikes", "match_spikes", "rms_spikes"]

RMS_SPIKE = 2.3  # smallest RMS_t that is a spike
LOSS_DEVIATIONS = 3.2  # a loss is high above the running mean plus this number of running standard deviations
IGNORED_STEPS = 1_000  # first steps, with small learning rates, in a run of _PAPER_STEPS
MERGE_STEPS = 10  # spikes within this number of steps count as one
FOLLOW_STEPS = (1, 8)  # first and last step after an RMS spike in which a loss spike follows it
_PAPER_STEPS = 20_000
WINDOW = 100  # steps of the running mean; the paper does not give its number


def rms_spikes(rms: Float[np.ndarray, " T"]) -> list[int]:
    """First step of each group of steps with RMS_t at `RMS_SPIKE` or above, except at the beginning of a run."""
    return _merge(1 + np.flatnonzero(rms >= RMS_SPIKE), len(rms))


def loss_spikes(loss: Float[np.ndarray, " T"], window: int = WINDOW) -> list[int]:
    """First step of each group of two or more high losses, except at the beginning of a run.

    A loss is high if it is not finite, or above the running mean by `LOSS_DEVIATIONS` standard deviations. Both are
    computed over the last `window` losses that were not high. After `window` high losses in a row, these are the new
    level. In a run of a few hundred steps the loss falls too far within 100 steps to see spikes: shorten the window.
    """
    high, normal, last_normal = [], [], 0
    for step, value in enumerate(loss.tolist(), 1):
        if step - last_normal > window:  # a new level
            normal, last_normal = [v for v in loss[last_normal : step - 1].tolist() if math.isfinite(v)], step
        recent = normal[-window:]
        if len(recent) >= MERGE_STEPS and not value <= np.mean(recent) + LOSS_DEVIATIONS * np.std(recent):
            high.append(step)
        else:
            normal.append(value)
            last_normal = step
    steps = np.array(high, int)
    repeated = [step for step in steps if ((steps >= step) & (steps < step + MERGE_STEPS)).sum() > 1]
    return _merge(np.array(repeated, int), len(loss))


def _merge(steps: np.ndarray, total: int) -> list[int]:
    """First step of each group, after the ignored steps. A group is all spikes within `MERGE_STEPS` of its first one
    ("multiple spikes over a short time interval of 10 iterations are only counted as one") and the uninterrupted
    continuation of the last one."""
    ignored = IGNORED_STEPS * min(1.0, total / _PAPER_STEPS)
    groups: list[int] = []
    first = last = -math.inf
    for step in steps.tolist():
        if step - first >= MERGE_STEPS and step > last + 1:
            first = step
            groups.append(step)
        last = step
    return [step for step in groups if step > ignored]


@dataclass(frozen=True)
class SpikeMatch:
    """Loss spikes matched with RMS spikes.

    Attributes:
        loss, rms: spikes of both.
        following: loss spikes that follow an RMS spike by `FOLLOW_STEPS`.
        covered: share of all steps that follow an RMS spike so, the probability that a random step does.
    """

    loss: list[int]
    rms: list[int]
    following: list[int]
    covered: float

    @property
    def p_value(self) -> float:
        """Probability of at least this number of following spikes if loss spikes came at random steps."""
        n, k, p = len(self.loss), len(self.following), self.covered
        if p in (0, 1):
            return float(k == 0 or p)

        def log_probability(i: int) -> float:  # binomial coefficients of a thousand spikes overflow
            coefficient = math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1)
            return coefficient + i * math.log(p) + (n - i) * math.log1p(-p)

        return min(1.0, math.fsum(math.exp(log_probability(i)) for i in range(k, n + 1)))


def match_spikes(loss: Float[np.ndarray, " T"], rms: Float[np.ndarray, " T"], window: int = WINDOW) -> SpikeMatch:
    """Match the spikes of a loss, with a running mean over `window` steps, with those of one tensor's RMS_t."""
    of_loss, of_rms = loss_spikes(loss, window), rms_spikes(rms)
    first, last = FOLLOW_STEPS
    after = {step + k for step in of_rms for k in range(first, last + 1) if step + k <= len(loss)}
    return SpikeMatch(of_loss, of_rms, [step for step in of_loss if step in after], len(after) / max(len(loss), 1))
