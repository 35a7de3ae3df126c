"""Kernel distance of features (KID, Binkowski et al. 2018): unbiased squared MMD with the kernel (x y / D + 1)^3.

Papers average the estimate over random subsets. This module uses all pairs of pictures, which has the same expectation,
less noise, and no seed. The estimate is unbiased at any number of pictures, so it can be negative for equal
distributions.

Shapes: N drawings, M real pictures, D features, R rows of weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from limner.metrics.features import Features

_ROWS_PER_BATCH = 512


def kernel(x: Float[Tensor, "N D"], y: Float[Tensor, "M D"]) -> Float64[Tensor, "N M"]:
    """Return the polynomial kernel of features."""
    return (x.double() @ y.double().T / x.shape[1] + 1) ** 3


class _Similarities(NamedTuple):
    """Statistics of `KernelDistance`."""

    drawn: Float[Tensor, "N D"]
    to_real: Float64[Tensor, " N"]  # mean kernel of each drawing and the real pictures
    of_drawing: Float64[Tensor, " N"]  # kernel of each drawing with the same drawing
    among_real: Float64[Tensor, ""]  # mean kernel of two different real pictures


class KernelDistance:
    """KID for weighted drawings. A drawing that counts twice is not paired with its copy."""

    def statistics(self, drawn: Features, real: Features) -> _Similarities:
        """Sum the kernels with real pictures, in batches of rows."""
        x, y = drawn.values, real.values
        to_real = torch.cat([kernel(rows, y).mean(1) for rows in x.split(_ROWS_PER_BATCH)])
        total = sum(kernel(rows, y).sum() for rows in y.split(_ROWS_PER_BATCH)) - _diagonal(y).sum()
        return _Similarities(x, to_real, _diagonal(x), total / (len(y) * (len(y) - 1)))

    def values(self, statistics: _Similarities, weights: Float[Tensor, "R N"]) -> dict[str, Float[Tensor, " R"]]:
        """Return the estimate for each row of weights."""
        w, x = weights.double(), statistics.drawn
        batches = zip(w.split(_ROWS_PER_BATCH, 1), x.split(_ROWS_PER_BATCH), strict=True)
        total = sum((part @ kernel(rows, x) * w).sum(1) for part, rows in batches)
        among_drawn = (total - w.square() @ statistics.of_drawing) / (w.sum(1).square() - w.square().sum(1))
        cross = w @ statistics.to_real / w.sum(1)
        return {"kid": among_drawn + statistics.among_real - 2 * cross}


def _diagonal(x: Float[Tensor, "N D"]) -> Float64[Tensor, " N"]:
    return (x.double().square().sum(1) / x.shape[1] + 1) ** 3
