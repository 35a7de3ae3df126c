"""Relaxed bound for the dVAE that does not collapse on small, flat pictures; not in the paper.

On scenes of a few colors the paper's objective (`elbo.py`) collapses to a handful of codes, and constant backgrounds,
through the learned scale b, dominate the likelihood.
docs/log/2026-11-21.md, "dVAE objectives for small flat pictures" compares alternatives.

Shapes: B batch, H x W pixels, h x w grid, V codes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Float, Num, UInt8
from torch import Tensor

from limner.metrics.codebook import usage
from limner.models.dvae import DVAE, map_pixels
from limner.objectives.elbo import check_tau, gumbel_softmax, logit_laplace_nll
from limner.optim.schedules import Anneal
from limner.validation import Range, Validated


def one_hot(logits: Float[Tensor, "B V h w"]) -> Float[Tensor, "B V h w"]:
    """Return the likeliest code of each position as one-hot decoder input: [B, V, h, w] -> [B, V, h, w]."""
    return F.one_hot(logits.argmax(1), logits.shape[1]).movedim(-1, 1).to(logits.dtype)


def contrast(pixels: UInt8[Tensor, "B 3 H W"], columns: int) -> Float[Tensor, "B 1 h {columns}"]:
    """Return the standard deviation within each patch plus 0.01: uint8 [B, 3, H, W] -> [B, 1, h, w], w = `columns`."""
    side = pixels.shape[-1] // columns
    x = map_pixels(pixels)
    variance = F.avg_pool2d(x.square(), side) - F.avg_pool2d(x, side).square()
    return variance.mean(1, keepdim=True).clamp_min(0).sqrt() + 0.01


@dataclass(frozen=True, kw_only=True)
class BalancedELB(Validated):
    """The paper's objective with four changes:

    - the KL of the *aggregate* posterior, the mean of q over the batch, replaces the KL of every *position* to the
      uniform prior. It favors use of all codes and lets each position be certain. The mean is weighted by local
      contrast: otherwise flat patches, which are most of a picture, take most of the codes, and a hundred codes for one
      shade cannot be predicted;
    - ln b is clamped from below at `min_log_b`, which bounds the weight of a pixel.

    The other two help a prior to combine attributes that it has not seen together
    (docs/log/2026-11-25.md, "Price for codes within one training"):

    - `contrast_weight` weighs the reconstruction of patches by local contrast within each picture: objects on a plain
      background are a tenth of its pixels and most of its content;
    - from step `usage_penalty_from` on the first change is reversed: rare codes cost more than frequent ones, so the
      model gives up codes that its decoder can infer from context.

    From step `freeze_encoder_from` on the encoder is frozen and the decoder is trained on argmax codes, as in
    generation.

    Args:
        usage_kl_weight: weight of the aggregate posterior's KL.
        usage_penalty: weight, times -1, of that KL from step `usage_penalty_from` on.
        usage_penalty_from: step from which the penalty replaces the weight; None: never.
        contrast_weight: share of a picture's weight that follows contrast, from 0 to 1; the rest is uniform.
        min_log_b: lower bound of ln b.
        tau: temperature of the relaxation.
        freeze_encoder_from: step from which the encoder is frozen; None: never.
    """

    usage_kl_weight: Annotated[float, Range(0, 1_000)] = 0.05
    usage_penalty: Annotated[float, Range(0, 1_000)] = 0.004
    usage_penalty_from: Annotated[int | None, Range(0, 10**9)] = None
    contrast_weight: Annotated[float, Range(0, 1)] = 0.0
    min_log_b: Annotated[float, Range(-100, 100)] = -1.0
    tau: Anneal = field(default=Anneal(start=1.0, end=0.1, steps=4_000))
    freeze_encoder_from: Annotated[int | None, Range(0, 10**9)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tau(self.tau)

    def gathered(self, all_gather: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
        """Return the objective for one of several processes, with the usage of all; `all_gather` joins their rows."""
        return partial(self, all_gather=all_gather)

    def __call__(
        self,
        model: DVAE,
        batch: dict[str, Tensor],
        step: int,
        generator: torch.Generator | None,
        all_gather: Callable[[Tensor], Tensor] = lambda rows: rows,
    ) -> tuple[Float[Tensor, ""], dict[str, Num[Tensor, ""]]]:
        pixels, tau = batch["pixels"], self.tau(step)
        frozen = self.freeze_encoder_from is not None and step >= self.freeze_encoder_from
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            logits = model.encode(pixels)
        mu, log_b = model.decode(one_hot(logits) if frozen else gumbel_softmax(logits, tau, generator))
        nll = logit_laplace_nll(map_pixels(pixels), mu, log_b.clamp_min(self.min_log_b))
        weight = contrast(pixels, logits.shape[-1])
        q = logits.movedim(1, -1).flatten(0, 2).softmax(-1)
        share = weight / all_gather(weight.sum().view(1)).sum()
        mean_q = all_gather((q * share.view(-1, 1)).sum(0, keepdim=True)).sum(0)
        imbalance = (mean_q * (mean_q.clamp_min(1e-9) * len(mean_q)).log()).sum()
        penalized = self.usage_penalty_from is not None and step >= self.usage_penalty_from
        loss = self.mean_nll(nll, weight) + (-self.usage_penalty if penalized else self.usage_kl_weight) * imbalance
        metrics = {"nll": nll.detach().mean(), "imbalance": imbalance.detach()}
        return loss, metrics | usage(logits.argmax(1), logits.shape[1]) | {"tau": torch.tensor(tau)}

    def mean_nll(self, nll: Float[Tensor, "B 3 H W"], weight: Float[Tensor, "B 1 h w"]) -> Float[Tensor, ""]:
        """Return the mean of `nll` over pixels, of which those in patches with more contrast count more."""
        if not self.contrast_weight:
            return nll.mean()
        patches = F.avg_pool2d(nll.mean(1, keepdim=True), nll.shape[-1] // weight.shape[-1])
        by_contrast = (patches * weight).sum((1, 2, 3)) / weight.sum((1, 2, 3))
        return (self.contrast_weight * by_contrast + (1 - self.contrast_weight) * nll.mean((1, 2, 3))).mean()
