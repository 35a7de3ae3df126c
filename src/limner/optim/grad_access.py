"""Storage-independent access to gradients. fp32 gradients are used unchanged.

A gradient in 16 bits stays multiplied by the gradient scale of its resblock until an update reads it, because division
in its own format would underflow. The scale is stored as an attribute of the gradient tensor and vanishes with it when
the gradient is set to None. `grad_values` returns the true values in fp32. (Ramesh et al. 2021 divide into 1-6-9
instead, where "the larger exponent range ensures that this division does not result in underflow", App. E.2, step 2.
That costs a pass over memory and one bit of the significand.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from limner import compat
from limner.numerics.formats import HALF_FORMATS
from limner.optim.dtensor import full_tensor, split_by_placement, sum_over_shards, to_local


def pending_scale(grad: Tensor) -> Tensor | None:
    """Scale, [], by which the stored values of a gradient are still multiplied; None without a scale."""
    return getattr(grad, "pending_scale", None)


def unscale(grad: Tensor, scale: Tensor) -> None:
    """Divide a gradient by a scale, []. A gradient in 16 bits records the scale and keeps its stored values."""
    if grad.dtype in HALF_FORMATS:
        recording: Any = grad
        recording.pending_scale = scale.clone() if (before := pending_scale(grad)) is None else before * scale
    else:
        to_local(grad).div_(scale)


def grad_values(grad: Tensor) -> Tensor:
    """Values of the local shard of a gradient: the stored tensor, or an unscaled fp32 copy of one in 16 bits."""
    stored, scale = to_local(grad), pending_scale(grad)
    if grad.dtype not in HALF_FORMATS:
        return stored
    return stored.float() if scale is None else stored.float().div_(scale)


def set_grad_values(grad: Tensor, values: Tensor) -> None:
    """Store values into the local shard of a gradient, such that `grad_values` returns them."""
    scale = pending_scale(grad)
    to_local(grad).copy_(values if scale is None else values * scale)


def round_to_storage(values: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Round fp32 values as storing them in a gradient of this format and scale would. 16-bit formats saturate."""
    if dtype not in HALF_FORMATS:
        return values
    end = torch.finfo(dtype).max
    stored = (values if scale is None else values * scale).clamp(-end, end).to(dtype).float()
    return stored if scale is None else stored.div_(scale)


def total_norm(grads: Iterable[Tensor]) -> Tensor:
    """Euclidean norm of all gradients together, [], equal on every process."""
    grads = list(grads)
    wide = split_by_placement(grad for grad in grads if grad.dtype not in HALF_FORMATS)
    norms = [full_tensor(nn.utils.get_total_norm(part)) for part in wide]
    for part in split_by_placement(grad for grad in grads if grad.dtype in HALF_FORMATS):
        shards = [torch.linalg.vector_norm(to_local(grad), dtype=torch.float32) for grad in part]  # fp16 overflows
        scales = map(pending_scale, part)
        shards = [x if scale is None else x / scale for x, scale in zip(shards, scales, strict=True)]
        norms.append(sum_over_shards(compat.foreach_mul(shards, shards), part).sum().sqrt())
    return norms[0] if len(norms) == 1 else nn.utils.get_total_norm(norms)


def clip_grads_with_norm(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale gradients, whose `total_norm` is `norm`, to a norm of at most `max_norm`."""
    parameters = [p for p in parameters if p.grad is not None]
    for part in split_by_placement(p for p in parameters if p.dtype not in HALF_FORMATS):
        nn.utils.clip_grads_with_norm_(part, max_norm, norm)
    for p in parameters:
        if p.dtype in HALF_FORMATS and p.grad is not None:
            unscale(p.grad, ((norm + 1e-6) / max_norm).clamp_min(1))  # 1e-6 as in torch
