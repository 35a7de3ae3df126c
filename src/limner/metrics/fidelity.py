"""The metrics that compare drawings with real pictures, and their values on the features of one extractor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from limner.errors import UserError
from limner.metrics.features import Features, Metric, check
from limner.metrics.frechet import ExtrapolatedFrechetDistance, FrechetDistance
from limner.metrics.inception_score import InceptionScore
from limner.metrics.kernel import KernelDistance
from limner.metrics.manifold import Manifold
from limner.metrics.moments import Moments

__all__ = ["METRICS", "compare"]

#: The metrics of a table, in its order.
METRICS: dict[str, Metric[Any]] = {
    "kid": KernelDistance(),
    "fid": FrechetDistance(),
    "fid-infinity": ExtrapolatedFrechetDistance(),
    "is": InceptionScore(),
    "manifold": Manifold(),
}


def compare(
    drawn: Features, real: Features | Moments, extractor: str, weights: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the values [R] of all `METRICS` by "metric[extractor]", for rows of weights [R, N], by default one of
    ones; with moments of the real features those of Fréchet distances alone. Raises `UserError` for features that
    cannot be compared."""
    check(drawn, "drawings", extractor)
    if isinstance(real, Features):
        check(real, "real pictures", extractor)
    sizes = drawn.values.shape[1], real.values.shape[1] if isinstance(real, Features) else len(real.mean)
    if sizes[0] != sizes[1]:
        raise UserError(
            f"drawings have {sizes[0]:,} features and real pictures {sizes[1]:,}: use one extractor for both"
        )
    weights = torch.ones(1, len(drawn.values)) if weights is None else weights
    values: dict[str, Tensor] = {}
    for metric in METRICS.values():
        if isinstance(real, Features) or isinstance(metric, FrechetDistance):
            statistics = metric.statistics(drawn, real)  # pyright: ignore[reportArgumentType]
            for name, value in metric.values(statistics, weights).items():
                values[f"{name}[{extractor}]"] = value
    return values
