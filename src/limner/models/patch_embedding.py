"""What later work knows of patches, the picture's tokens in a vision transformer: where they are, and how many suffice.

Shapes: B batch, S patches, n = 1 + S with the class token, k of these, D width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def some_patches(x: Float[Tensor, "B n D"], kept: int) -> Float[Tensor, "B k D"]:
    """The class token and `kept` of the patches, others for each picture: [B, 1 + S, D] -> [B, 1 + kept, D]."""
    chosen = 1 + torch.rand(len(x), x.shape[1] - 1, device=x.device).argsort(1)[:, :kept]
    index = F.pad(chosen, (1, 0))[..., None].expand(-1, -1, x.shape[2])
    return x.gather(1, index)


def sinusoids(side: int, width: int) -> Float[Tensor, "S {width}"]:
    """Where each of side x side patches is (Beyer et al. 2022): [side^2, width], of the size of patch embeddings.

    Learned positions begin as small noise and stay small. A model that has only these tells "a above b"
    from "b above a" no better than a coin. Wavelengths go from two patches to four times the picture.

    On the CPU whatever the default device, so that models can be built on the meta device.
    """
    waves = torch.pi * torch.logspace(0, -1, width // 4, 2 * side, device="cpu")
    angles = torch.arange(side, device="cpu")[:, None] * waves
    axis = torch.cat([angles.sin(), angles.cos()], 1)
    both = torch.cat([axis[:, None].expand(-1, side, -1), axis.expand(side, -1, -1)], -1).flatten(0, 1)
    return F.pad(both, (0, width - both.shape[1]))
