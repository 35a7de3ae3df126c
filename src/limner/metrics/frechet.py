"""Fréchet distance of features (FID, Heusel et al. 2017): distance of two Gaussians with the features' moments.

    d^2 = |m1 - m2|^2 + tr C1 + tr C2 - 2 tr (C1 C2)^(1/2)

With a root A of C1, C1 = A A^T, the eigenvalues of C1 C2 are those of the symmetric matrix A^T C2 A. So symmetric
solvers in float64 suffice: no root of an asymmetric matrix, no complex numbers, and no negative distance of equal sets.

The distance of finite samples is biased upward: two halves of one set differ. With many more drawings than features the
bias is nearly proportional to 1 / N (Chong & Forsyth 2020), which extrapolation to infinitely many drawings removes.

Shapes: N drawings, M real pictures, D features, K rank, R rows of weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from limner.metrics.features import Features
from limner.metrics.moments import Moments, require_equal_sizes

MIN_DRAWINGS_PER_FEATURE = 4  # to extrapolate


def frechet_distance(a: Moments, b: Moments) -> float:
    """Return the squared distance of two Gaussians. Raises `UserError` if their numbers of features differ."""
    require_equal_sizes(a, b)
    a, b = sorted((a, b), key=lambda moments: moments.count)  # fewer pictures, smaller rank
    root = _root(a.covariance)
    overlap = _sum_of_roots(root.T @ b.covariance @ root)
    squared = (a.mean - b.mean).square().sum() + a.covariance.trace() + b.covariance.trace() - 2 * overlap
    return float(squared.clamp_min(0))


def _root(covariance: Float64[Tensor, "D D"]) -> Float64[Tensor, "D K"]:
    """Return A with A A^T = covariance, without directions whose variance is rounding error."""
    variances, directions = torch.linalg.eigh(covariance)
    rounding = len(variances) * torch.finfo(variances.dtype).eps * variances[-1]
    return (directions * variances.clamp_min(0).sqrt())[:, variances > rounding]


def _sum_of_roots(product: Float64[Tensor, "K K"]) -> Float64[Tensor, ""]:
    """Return the sum of the roots of the eigenvalues of a symmetric matrix without negative eigenvalues."""
    return torch.linalg.eigvalsh(product).clamp_min(0).sqrt().sum()


class _Projected(NamedTuple):
    """Statistics of `FrechetDistance`, relative to the mean of the real pictures."""

    drawn: Float64[Tensor, "N D"]
    projected: Float64[Tensor, "N K"]  # drawn @ A, with A A^T the covariance of the real pictures
    real_variance: Float64[Tensor, ""]  # trace of that covariance


class FrechetDistance:
    """FID, `frechet_distance` for weighted drawings: the Gram matrix of N drawings replaces their covariance if N < K,
    which has the same eigenvalues."""

    def statistics(self, drawn: Features, real: Features | Moments) -> _Projected:
        """Project the drawings on the root of the real covariance."""
        moments = Moments.of(real.values) if isinstance(real, Features) else real
        centered = drawn.values.double() - moments.mean
        return _Projected(centered, centered @ _root(moments.covariance), moments.covariance.trace())

    def values(self, statistics: _Projected, weights: Float[Tensor, "R N"]) -> dict[str, Float[Tensor, " R"]]:
        """Return the squared distance for each row of weights."""
        return {"fid": torch.stack([self._distance(statistics, row.double()) for row in weights])}

    def _distance(self, statistics: _Projected, weights: Float64[Tensor, " N"]) -> Float64[Tensor, ""]:
        rows = weights.nonzero()[:, 0]
        w, x, y = weights[rows, None], statistics.drawn[rows], statistics.projected[rows]
        total = w.sum()
        mean = (w * x).sum(0) / total
        variance = (w * (x - mean).square()).sum() / (total - 1)
        y = (w / (total - 1)).sqrt() * (y - (w * y).sum(0) / total)
        overlap = _sum_of_roots(y @ y.T if len(y) < y.shape[1] else y.T @ y)
        return (mean.square().sum() + variance + statistics.real_variance - 2 * overlap).clamp_min(0)


class ExtrapolatedFrechetDistance(FrechetDistance):
    """FID-infinity: FID(N) = FID(inf) + c / N, from two N instead of the paper's fifteen, all drawings and each half:
    FID(inf) = 2 FID(N) - FID(N / 2). It may be negative. The bias by the number of real pictures remains."""

    def values(self, statistics: _Projected, weights: Float[Tensor, "R N"]) -> dict[str, Float[Tensor, " R"]]:
        """Return the extrapolated distance for each row of weights; {} for fewer than four drawings per feature, where
        the bias is not proportional to 1 / N."""
        if len(statistics.drawn) < MIN_DRAWINGS_PER_FEATURE * statistics.drawn.shape[1]:
            return {}
        half = (torch.arange(weights.shape[1], device=weights.device) % 2).to(weights)
        whole, *halves = (
            torch.stack([self._distance(statistics, row.double()) for row in weights * part])
            for part in (1, half, 1 - half)
        )
        return {"fid-infinity": 2 * whole - torch.stack(halves).mean(0)}
