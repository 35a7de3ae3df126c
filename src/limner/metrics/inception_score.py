"""Inception Score (Salimans et al. 2016): exp(E KL(p(c | picture) || p(c))), the mean over ten splits.

High if a classifier is sure of each drawing and drawings are of many classes. It does not see the real pictures.

Shapes: N drawings, C classes, S splits, R rows of weights.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from limner.metrics.features import Features

SPLITS = 10


class InceptionScore:
    """Inception Score of weighted drawings, split in their order as in the authors' code; {} without a classifier."""

    def statistics(self, drawn: Features, real: Features) -> Float64[Tensor, "N C"] | None:
        """Return log-probabilities of classes."""
        return None if drawn.logits is None else drawn.logits.double().log_softmax(1)

    def values(
        self, statistics: Float64[Tensor, "N C"] | None, weights: Float[Tensor, "R N"]
    ) -> dict[str, Float[Tensor, " R"]]:
        """Return the mean over splits for each row of weights. A resampled split without drawings is left out."""
        if statistics is None:
            return {}
        n = len(statistics)
        scores = []
        for split in range(SPLITS):
            part = slice(split * n // SPLITS, (split + 1) * n // SPLITS)
            log_p = statistics[part]
            p, w = log_p.exp(), weights[:, part].double()
            w = w / w.sum(1, keepdim=True)
            marginal = w @ p
            # mean KL = sum_c E[p log p] - p(c) log p(c)
            divergence = w @ (p * log_p).sum(1) - torch.special.xlogy(marginal, marginal).sum(1)
            scores.append(divergence.exp())
        return {"is": torch.stack(scores).nanmean(0)}
