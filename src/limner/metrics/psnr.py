"""Peak signal-to-noise ratio of pictures."""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor


def psnr(a: UInt8[Tensor, "B 3 H W"], b: UInt8[Tensor, "B 3 H W"]) -> Float[Tensor, " B"]:
    """Peak signal-to-noise ratio in dB of each picture: uint8 [B, 3, H, W] twice -> float32 [B].

    The mean squared error counts as 0.01 at least, so equal pictures have 68 dB instead of infinity.
    """
    error = (a.float() - b.float()).square().flatten(1).mean(1)
    return 10 * torch.log10(255**2 / error.clamp_min(1e-2))
