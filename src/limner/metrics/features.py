"""Features of pictures, and the protocol of metrics that compare drawings with real pictures.

A metric computes statistics from features once, and values from the statistics as often as needed: a row of weights
says how often each drawing counts. Ones give the metric of the drawings; resampled rows give its bootstrap replicates
(Efron 1979) without new features, kernels or distances.

Shapes: N drawings, M real pictures, D features, C classes, R rows of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from jaxtyping import Float
from torch import Tensor

from limner.errors import UserError

__all__ = ["Features", "Metric", "check"]

MIN_PICTURES = 10  # on each side; the Inception Score has ten splits

Statistics = TypeVar("Statistics")


@dataclass(frozen=True)
class Features:
    """Features [N, D] of N pictures, and logits [N, C] of classes if the extractor has a classifier."""

    values: Float[Tensor, "N D"]
    logits: Float[Tensor, "N C"] | None = None

    def __getitem__(self, index: Tensor | slice) -> Features:
        """Return the features of some pictures."""
        return Features(self.values[index], None if self.logits is None else self.logits[index])


class Metric(Protocol[Statistics]):
    """A comparison of drawings with real pictures."""

    def statistics(self, drawn: Features, real: Features) -> Statistics:
        """Compute what all values need."""
        ...

    def values(self, statistics: Statistics, weights: Float[Tensor, "R N"]) -> Mapping[str, Float[Tensor, " R"]]:
        """Return values by name for each row of weights, whole numbers; {} if the features do not suffice."""
        ...


def check(features: Features, pictures: str, extractor: str) -> None:
    """Raise `UserError` for features of `pictures` that cannot be compared: too few, or not finite."""
    if len(features.values) < MIN_PICTURES:
        raise UserError(f"{len(features.values)} {pictures} are too few to compare: give at least {MIN_PICTURES}")
    if not features.values.isfinite().all():
        raise UserError(
            f"the features {extractor} of the {pictures} are not finite, so its weights are damaged: use another copy"
        )
