"""Reconstruction loss of a dVAE of patches (`models/patch_dvae.py`), whose codes are fixed.

Squared error is the likelihood of a normal distribution with one scale for all pixels, absolute error that of a Laplace
distribution. Where the codes do not determine on which side of an edge a pixel is, the mean of both colors minimizes
squared error, and one of the two minimizes absolute error, so edges become sharp. Absolute error from the start left
the borders of patches visible, so it is used last. With the paper's logit-Laplace likelihood, whose scale is learned,
this decoder hardly improved
(docs/log/2026-11-26.md, "Absolute error in the last steps"; docs/log/2026-11-23.md, "dVAE of patches for icons").

Shapes: B batch, H x W pixels.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float, Num
from torch import Tensor

from limner.metrics.codebook import usage
from limner.models.dvae import map_pixels
from limner.models.patch_dvae import PatchDVAE
from limner.validation import Range, Validated

__all__ = ["ReconstructionLoss"]


@dataclass(frozen=True, kw_only=True)
class ReconstructionLoss(Validated):
    """Mean squared error of pixels in per cent of the whole range's square, then mean absolute error in per cent of the
    range.

    Args:
        l1_from: step from which the error is absolute; None: never.
    """

    l1_from: Annotated[int | None, Range(0, 10**9)] = None

    def __call__(
        self, model: PatchDVAE, batch: dict[str, Tensor], step: int, generator: torch.Generator | None
    ) -> tuple[Float[Tensor, ""], dict[str, Num[Tensor, ""]]]:
        pixels = batch["pixels"]
        tokens = model.tokenize(pixels)
        side = model.config.patch
        drawn = model.decode(tokens.unflatten(1, (pixels.shape[2] // side, pixels.shape[3] // side)))
        error = drawn - map_pixels(pixels)
        absolute = self.l1_from is not None and step >= self.l1_from
        loss = 100 * (error.abs() if absolute else error.square()).mean()
        return loss, usage(tokens, model.config.vocab)
