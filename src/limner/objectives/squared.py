"""The objective of a dVAE of patches (`models/patches.py`): its codes are set, and its decoder learns.

Squared error is the likelihood of a normal distribution with one scale for all pixels. The paper's logit-Laplace, whose
scale is learned, moved this decoder hardly (docs/LOG.md).

Shapes: B batch, H x W pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Num
from torch import Tensor

from limner.metrics.codebook import usage
from limner.models.dvae import map_pixels
from limner.models.patches import PatchDVAE


@dataclass(frozen=True, kw_only=True)
class SquaredError:
    """Mean squared error of pixels in per cent of the whole range's square."""

    def __call__(
        self, model: PatchDVAE, batch: dict[str, Tensor], step: int, generator: torch.Generator | None
    ) -> tuple[Float[Tensor, ""], dict[str, Num[Tensor, ""]]]:
        pixels = batch["pixels"]
        tokens = model.tokens(pixels)
        side = model.config.patch
        drawn = model.decode(tokens.unflatten(1, (pixels.shape[2] // side, pixels.shape[3] // side)))
        loss = 100 * (drawn - map_pixels(pixels)).square().mean()
        return loss, usage(tokens, model.config.vocab)
