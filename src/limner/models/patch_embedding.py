"""Patch dropout and fixed position encodings for a vision transformer, from work after CLIP.

Shapes: B batch, S patches, n = 1 + S with the class token, k of these, D width.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def drop_patches(x: Float[Tensor, "B n D"], count: int) -> Float[Tensor, "B k D"]:
    """Keep the class token and `count` random patches of each picture: [B, 1 + S, D] -> [B, 1 + count, D]."""
    chosen = 1 + torch.rand(len(x), x.shape[1] - 1, device=x.device).argsort(1)[:, :count]
    index = F.pad(chosen, (1, 0))[..., None].expand(-1, -1, x.shape[2])
    return x.gather(1, index)


def sinusoids(side: int, width: int) -> Float[Tensor, "S {width}"]:
    """Return sinusoidal position encodings of side x side patches (Beyer et al. 2022): [side^2, width].

    Learned positions begin as small noise and stay small. With these alone a model distinguishes "a above b" from
    "b above a" no better than chance. Wavelengths range from two patches to four times the picture.

    Computed on the CPU for every default device, so that models can be built on the meta device.
    """
    waves = torch.pi * torch.logspace(0, -1, width // 4, 2 * side, device="cpu")
    angles = torch.arange(side, device="cpu")[:, None] * waves
    axis = torch.cat([angles.sin(), angles.cos()], 1)
    both = torch.cat([axis[:, None].expand(-1, side, -1), axis.expand(side, -1, -1)], -1).flatten(0, 1)
    return F.pad(both, (0, width - both.shape[1]))
