"""Precision, recall, density and coverage of drawings, from distances to nearest neighbors.

A set's manifold is the union of balls around its features, each with the distance to its k-th nearest neighbor in the
set as radius (Kynkäänniemi et al. 2019). Balls around outliers are large, so Naeem et al. (2020) count balls.

    precision   share of drawings in the manifold of real pictures
    recall      share of real pictures in the manifold of drawings
    density     real balls that a drawing is in, divided by k
    coverage    share of real balls with a drawing in them

Shapes: N drawings, M real pictures, D features, R rows of weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from limner.metrics.features import Features

NEIGHBORS = 5  # k of Naeem et al.
EQUAL = 1e-5  # features closer than this share of their length are of equal pictures, which differ by rounding
_ROWS_PER_BATCH = 512


class _Balls(NamedTuple):
    """Statistics of `Manifold`."""

    drawn: Float64[Tensor, "N D"]
    real: Float64[Tensor, "M D"]
    drawn_radii: Float64[Tensor, " N"]
    real_radii: Float64[Tensor, " M"]


class Manifold:
    """Precision, recall, density and coverage of weighted drawings. Resampling keeps the radii of all drawings."""

    def statistics(self, drawn: Features, real: Features) -> _Balls:
        """Find the radii."""
        x, y = drawn.values.double(), real.values.double()
        return _Balls(x, y, _radii(x), _radii(y))

    def values(self, statistics: _Balls, weights: Float[Tensor, "R N"]) -> dict[str, Float[Tensor, " R"]]:
        """Return the four shares for each row of weights."""
        x, y, drawn_radii, real_radii = statistics
        present = (weights > 0).double().T
        balls = x.new_zeros(len(x))  # real balls that each drawing is in
        recalled = covered = x.new_zeros(len(weights))
        for real, radii in zip(y.split(_ROWS_PER_BATCH), real_radii.split(_ROWS_PER_BATCH), strict=True):
            distances = _distances(real, x)
            in_real = (distances <= radii[:, None]).double()
            balls += in_real.sum(0)
            covered = covered + (in_real @ present > 0).sum(0)
            recalled = recalled + ((distances <= drawn_radii).double() @ present > 0).sum(0)
        w = weights.double()
        return {
            "precision": w @ (balls > 0).double() / w.sum(1),
            "recall": recalled / len(y),
            "density": w @ balls / (NEIGHBORS * w.sum(1)),
            "coverage": covered / len(y),
        }


def _radii(x: Float64[Tensor, "N D"]) -> Float64[Tensor, " N"]:
    """Return the distance of each row to its k-th nearest other row."""
    nearest = [_distances(rows, x).kthvalue(NEIGHBORS + 1).values for rows in x.split(_ROWS_PER_BATCH)]
    return torch.cat(nearest)


def _distances(x: Float64[Tensor, "N D"], y: Float64[Tensor, "M D"]) -> Float64[Tensor, "N M"]:
    distances = torch.cdist(x, y)
    return distances * (distances > EQUAL * y.norm(dim=1))
