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


def _absmax(x: Tensor, dim: int = 1) -> Tensor:
    """Return the largest magnitudes along `dim`, NaN if any entry is. On CPUs two reductions are faster than one."""
    return torch.maximum(x.amax(dim), -x.amin(dim))


def _scaled(x: Tensor, inverse: Tensor) -> Tensor:
    """Return int8 of a matrix times inverse scales, one [] or one for each column [n]."""
    values = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    for part, out in zip(_parts(x, x.shape), _parts(values, x.shape), strict=True):
        out.copy_((part.float() * inverse).round_())
    return values


def _parts(x: Tensor, shape: torch.Size) -> Iterator[Tensor]:
    """Split a matrix of this shape, or a vector with an entry per row, by rows into parts that fit a cache."""
    return iter(x.split(max(1, _CPU_VALUES_PER_PART // max(1, shape[1]))))
