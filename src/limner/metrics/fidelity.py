"""The metrics that compare drawings with real pictures, and their values on the features of one extractor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from limner.metrics.features import Features, Metric, check
from limner.metrics.frechet import ExtrapolatedFrechetDistance, FrechetDistance
from limner.metrics.inception_score import InceptionScore
from limner.metrics.kernel import KernelDistance
from limner.metrics.manifold import Manifold

__all__ = ["METRICS", "compare"]

#: The metrics of a table, in its order.
METRICS: dict[str, Metric[Any]] = {
    "kid": KernelDistance(),
    "fid": FrechetDistance(),
    "fid-infinity": ExtrapolatedFrechetDistance(),
    "is": InceptionScore(),
    "manifold": Manifold(),
}


def compare(drawn: Features, real: Features, extractor: str, weights: Tensor | None = None) -> dict[str, Tensor]:
    """Return the values [R] of all `METRICS` by "metric[extractor]", for rows of weights [R, N], by default one of
    ones. Raises `UserError` for features that cannot be compared."""
    check(drawn, real, extractor)
    weights = torch.ones(1, len(drawn.values)) if weights is None else weights
    values: dict[str, Tensor] = {}
    for metric in METRICS.values():
        for name, value in metric.values(metric.statistics(drawn, real), weights).items():
            values[f"{name}[{extractor}]"] = value
    return values
