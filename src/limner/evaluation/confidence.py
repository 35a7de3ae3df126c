"""Estimates with 95% confidence intervals, mostly proportions over clustered cases.

1,024 held-out captions share 30 held-out attribute combinations, and a model that cannot draw a combination fails on
all of its captions. Cases of one cluster are correlated, so an interval that treats captions as independent is too
narrow. The method:

1. The variance of the mean is estimated between clusters (Liang & Zeger 1986).
2. The effective sample size is the number of independent cases with that variance, at most the real number, corrected
   for few clusters by Student's t (Korn & Graubard 1998).
3. The interval is Wilson's score interval for that sample size, which stays inside [0, 1] and non-empty near 0 and 1.

The interval covers other clusters of the same kind, not only other cases of these clusters. If all values are equal,
the correlation cannot be estimated and cases count as independent.

Captions used for model selection give biased scores. Seeds below `TEST_SEEDS_FROM` are for selection, seeds from it on
are for published scores. Different seeds give different captions and different noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

__all__ = [
    "TEST_SEEDS_FROM",
    "Estimate",
    "drawing_seed",
    "mean",
    "paired_difference",
    "proportion",
    "t_quantile",
    "wilson",
]

TEST_SEEDS_FROM = 1_000  # first seed for published scores

_Z_975 = 1.96  # the 97.5th percentile of the normal distribution
_MIN_VARIANCE = 1e-24  # smaller variances are rounding errors


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number, with the 95% interval from `low` to `high` if it has one.

    Attributes:
        spec: format of the number, such as ".2%"; "+.1%" for a difference.
        right, total: a proportion is `right` of `total` cases. `right` may be fractional: a caption can count by the
            share of its candidates that are right.
    """

    value: float
    unit: str = ""
    spec: str = ".2f"
    low: float | None = None
    high: float | None = None
    right: float | None = None
    total: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in (None, "") and key != "spec"}

    @property
    def short(self) -> str:
        """The number and its unit without the interval."""
        return f"{self.value:{self.spec}} {self.unit}".strip()

    def __str__(self) -> str:
        """The number, its interval, and for a difference the verdict on its sign."""
        if self.low is None or self.high is None:
            return self.short
        text = f"{self.short} ({self.low:{self.spec}} to {self.high:{self.spec}})"
        if not self.spec.startswith("+"):
            return text
        return f"{text}: {'better' if self.low > 0 else 'worse' if self.high < 0 else 'not significant'}"


def proportion(values: np.ndarray, clusters: Sequence[str]) -> Estimate:
    """Return the mean of `values` [n] in 0 .. 1, n >= 1; `clusters` [n] names the cluster of each case."""
    values, n = np.asarray(values, float), len(values)
    variance, degrees = _clustered(values, clusters)
    p = float(values.mean())
    effective: float = n
    if degrees == 0:
        effective = 1
    elif variance > 0:
        effective = min(n, p * (1 - p) / variance * (_Z_975 / t_quantile(degrees)) ** 2)
    low, high = wilson(p, max(effective, 1))
    right = round(float(values.sum()), 6)
    return Estimate(value=right / n, spec=".1%", low=low, high=high, right=right, total=n)


def mean(values: np.ndarray, unit: str) -> Estimate:
    """Return the mean of independent `values` [n], n >= 1, with an interval by Student's t if n >= 2."""
    center, n = float(np.mean(values)), len(values)
    if n < 2:
        return Estimate(value=center, unit=unit)
    half_width = t_quantile(n - 1) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return Estimate(value=center, unit=unit, low=center - half_width, high=center + half_width)


def paired_difference(values: np.ndarray, baseline: np.ndarray, clusters: Sequence[str]) -> Estimate:
    """Return the mean of `values - baseline` [n], two proportions over the same cases.

    If all clusters have the same difference, the half-width of the interval is Wilson's upper bound for 0 of n cases.
    """
    differences = np.asarray(values, float) - np.asarray(baseline, float)
    variance, degrees = _clustered(differences, clusters)
    center = float(differences.mean())
    if degrees == 0:
        half_width = 1.0
    elif variance > _MIN_VARIANCE:
        half_width = t_quantile(degrees) * math.sqrt(variance)
    else:
        half_width = wilson(0.0, len(differences))[1]
    return Estimate(value=center, spec="+.1%", low=max(-1.0, center - half_width), high=min(1.0, center + half_width))


def wilson(p: float, n: float) -> tuple[float, float]:
    """Return the score interval of a proportion `p` of `n` > 0 independent cases (Wilson 1927)."""
    center, half_width = p + _Z_975**2 / (2 * n), _Z_975 * math.sqrt(p * (1 - p) / n + _Z_975**2 / (4 * n**2))
    scale = 1 + _Z_975**2 / n
    return max(0.0, (center - half_width) / scale), min(1.0, (center + half_width) / scale)


def t_quantile(degrees: int) -> float:
    """Return the 97.5th percentile of Student's t, from 3 `degrees` on by Cornish-Fisher expansion: within 1%."""
    if degrees < 3:
        return (12.706, 4.303)[degrees - 1]
    z, d = _Z_975, degrees
    return (
        z
        + (z**3 + z) / (4 * d)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * d**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * d**3)
    )


def _clustered(values: np.ndarray, clusters: Sequence[str]) -> tuple[float, int]:
    """Return the variance of the mean of `values` [n] between clusters, and its degrees of freedom."""
    if len(values) != len(clusters) or not len(values):
        raise ValueError(
            f"{len(values)} values and {len(clusters)} cluster names: give one name per value, and at least one value"
        )
    _, index = np.unique(np.asarray(clusters), return_inverse=True)
    sums = np.bincount(index, values - values.mean())
    degrees = len(sums) - 1
    if degrees == 0:
        return 0.0, 0
    return float(len(sums) / degrees * (sums**2).sum() / len(values) ** 2), degrees


def drawing_seed(seed: int, i: int) -> int:
    """Return the seed for caption i of an evaluation, valid for `limner draw --seed`.

    It is unique for i below 10**6 and seeds below 9 * 10**12.
    """
    return (seed * 1_000_000 + i) % 2**63
