"""Shares with 95% intervals, over clusters of cases that are alike.

1,024 held-out captions share 30 held-out combinations, and a model that cannot draw a combination fails on
all of its captions. So they tell less than 1,024 unrelated captions would. Therefore the variance of a share is taken
between clusters (Liang & Zeger 1986), turned into the number of unrelated cases that would vary as much
(the effective sample size, never above the real one, and corrected for the few clusters by Student's t:
Korn & Graubard 1998), and Wilson's interval is taken for that number, which is sensible also near 0 and 1.
It covers other clusters of the kind, not only other cases of these clusters.

If all verdicts are the same, the likeness within clusters cannot be estimated, and the cases count as unrelated.

Captions that a choice was made on do not measure it. A bundle or a setting is chosen by scores on seeds below 1,000;
published scores are on seeds from `PUBLISHED` on, and no choice is made on those. Different seeds draw their captions
and drawings from numbers of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

PUBLISHED = 1_000  # the first of the seeds that figures are published on

_Z = 1.96  # the 97.5th percentile of the normal distribution
_ROUNDING = 1e-24  # variance below which clusters do not differ


@dataclass(frozen=True, kw_only=True)
class Rate:
    """`right` of `total` cases, with the 95% interval from `low` to `high`.

    `right` need not be whole: a case may be right in part, such as a caption by the share of its drawings.
    """

    right: float
    total: int
    low: float
    high: float

    @staticmethod
    def of(values: np.ndarray, clusters: Sequence[str]) -> Rate:
        """The mean of `values` [n], each from 0 to 1, where cases of one cluster are alike; n is at least 1."""
        values, n = np.asarray(values, float), len(values)
        variance, degrees = _clustered(values, clusters)
        p = float(values.mean())
        effective: float = n
        if degrees == 0:
            effective = 1
        elif variance > 0:
            effective = min(n, p * (1 - p) / variance * (_Z / student(degrees)) ** 2)
        low, high = wilson(p, max(effective, 1))
        return Rate(right=round(float(values.sum()), 6), total=n, low=low, high=high)

    @property
    def value(self) -> float:
        return self.right / self.total

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "rate": self.value}

    def __str__(self) -> str:
        return f"{self.value:6.1%} ({self.low:.1%} to {self.high:.1%})"


@dataclass(frozen=True, kw_only=True)
class Gain:
    """By how much one share is above another of the same cases, in shares, with the 95% interval."""

    value: float
    low: float
    high: float

    @staticmethod
    def of(values: np.ndarray, others: np.ndarray, clusters: Sequence[str]) -> Gain:
        """The mean of `values` [n] less `others` [n], case by case. If clusters do not differ in it, as where no case
        does, the interval reaches as far as n equal cases do not rule out."""
        differences = np.asarray(values, float) - np.asarray(others, float)
        variance, degrees = _clustered(differences, clusters)
        mean = float(differences.mean())
        if degrees == 0:
            reach = 1.0
        elif variance > _ROUNDING:
            reach = student(degrees) * math.sqrt(variance)
        else:
            reach = wilson(0.0, len(differences))[1]
        return Gain(value=mean, low=max(-1.0, mean - reach), high=min(1.0, mean + reach))

    def __str__(self) -> str:
        """In percentage points, and whether it differs from zero."""
        if self.low > 0:
            verdict = "better"
        elif self.high < 0:
            verdict = "worse"
        else:
            verdict = "not told apart"
        return f"{100 * self.value:+.1f} points ({100 * self.low:+.1f} to {100 * self.high:+.1f}): {verdict}"


def wilson(p: float, n: float) -> tuple[float, float]:
    """The score interval of a share `p` of `n` unrelated cases (Wilson 1927), n above 0."""
    middle, spread = p + _Z**2 / (2 * n), _Z * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n**2))
    scale = 1 + _Z**2 / n
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def student(degrees: int) -> float:
    """The 97.5th percentile of Student's t, to 1% from 4 degrees of freedom on (Cornish-Fisher expansion)."""
    z, d = _Z, degrees
    return (
        z
        + (z**3 + z) / (4 * d)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * d**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * d**3)
    )


def _clustered(values: np.ndarray, clusters: Sequence[str]) -> tuple[float, int]:
    """The variance of the mean of `values` [n] between clusters, and how many clusters there are beyond one."""
    if len(values) != len(clusters) or not len(values):
        raise ValueError(f"{len(values)} values of {len(clusters)} cases: an interval needs one each, and a case")
    _, which = np.unique(np.asarray(clusters), return_inverse=True)
    sums = np.bincount(which, values - values.mean())
    degrees = len(sums) - 1
    if degrees == 0:
        return 0.0, 0
    return float(len(sums) / degrees * (sums**2).sum() / len(values) ** 2), degrees


def drawing_seed(seed: int, i: int) -> int:
    """The seed that caption i of an evaluation is drawn with, which `limner draw --seed` takes, too.

    No two (seed, i) share it, for i below a million and seeds below 9 million million.
    """
    return (seed * 1_000_000 + i) % 2**63
