"""Scales of 8-bit numbers, for int8 and float8."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

INT8 = 127  # the largest magnitude with both signs in int8; -128 is not used
MIN_ABSMAX = 2.0**-109  # lower bound for absmax: with less, a scale's inverse could overflow fp32


def scale_and_inverse(absmax: Float[Tensor, ...], largest: float) -> tuple[Float[Tensor, ...], Float[Tensor, ...]]:
    """Return (scale, inverse) in fp32 such that absmax * inverse = `largest`, in the shape of absmax."""
    absmax = absmax.float().clamp_min(MIN_ABSMAX)  # NaN stays NaN
    largest_tensor = torch.full_like(absmax, largest)  # torch divides by a number through a reciprocal, rounded twice
    return absmax / largest_tensor, largest_tensor / absmax
