"""Scales of numbers in eight bits, which integers and float8 share."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

INT8 = 127  # the largest int8 but for the sign: -128 has no counterpart
SMALLEST = 2.0**-109  # absmax below which a scale's inverse could overflow fp32; smaller ones share this one's scale


def scales(absmax: Float[Tensor, ...], largest: float) -> tuple[Float[Tensor, ...], Float[Tensor, ...]]:
    """(scale, inverse) in fp32 such that the magnitudes absmax, times the inverse, become `largest`."""
    there = absmax.float().clamp_min(SMALLEST)  # NaN stays NaN
    most = torch.full_like(there, largest)  # with a number, torch would multiply by a reciprocal, rounded twice
    return there / most, most / there
