"""Gradients as numbers, in whatever format they are kept.

A gradient in fp32 is what it says. One in 16 bits stays multiplied by the scale of its resblock until an update reads
it: divided in its own format it would underflow, which the scale is there to prevent. So it carries what it is still to
be divided by, which goes when the gradient goes (set to None, not to zero), and whoever needs its values calls `read`.
(Ramesh et al. 2021 put the quotient into 1-6-9 instead, where "the larger exponent range ensures that this division
does not result in underflow", App. E.2, step 2; that costs a pass over memory, and a bit of the significand.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from limner.numerics.formats import HALVES
from limner.optim.dtensor import by_kind, local, total, whole


def divisor(grad: Tensor) -> Tensor | None:
    """What the values of a gradient are still to be divided by, []; None if by nothing."""
    return getattr(grad, "divisor", None)


def divide(grad: Tensor, by: Tensor) -> None:
    """Divide a gradient by a number, []. One in 16 bits stays as it is and takes note."""
    if grad.dtype in HALVES:
        noted: Any = grad
        noted.divisor = by.clone() if (before := divisor(grad)) is None else before * by
    else:
        local(grad).div_(by)


def divide_all(scales: Mapping[Tensor, Tensor | None]) -> None:
    """Divide the gradient of each parameter by its scale, [], if it has both."""
    for p, scale in scales.items():
        if p.grad is not None and scale is not None:
            divide(p.grad, scale)


def read(grad: Tensor) -> Tensor:
    """The values of a gradient, of a shared one this process's shard: itself, or a copy in fp32 if it has 16 bits."""
    own, by = local(grad), divisor(grad)
    if grad.dtype not in HALVES:
        return own
    return own.float() if by is None else own.float().div_(by)


def write(grad: Tensor, values: Tensor) -> None:
    """Keep values, of a shared gradient this process's shard, as what `read` will give."""
    by = divisor(grad)
    local(grad).copy_(values if by is None else values * by)


def rounded(values: Tensor, dtype: torch.dtype, by: Tensor | None) -> Tensor:
    """What `read` will give of values that are kept in that format, to be divided by that number: in 16 bits those that
    leave fp16 become its largest."""
    if dtype not in HALVES:
        return values
    end = torch.finfo(dtype).max
    kept = (values if by is None else values * by).clamp(-end, end).to(dtype).float()
    return kept if by is None else kept.div_(by)


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The Euclidean length of all of them together, [], the same on every process."""
    wide, halves = _apart(gradients)
    lengths = [whole(nn.utils.get_total_norm(some)) for some in by_kind(wide)] if wide or not halves else []
    for some in by_kind(halves):
        if some:  # in fp32: sums of squares leave fp16
            own = [torch.linalg.vector_norm(local(grad), dtype=torch.float32) for grad in some]
            own = [x if (by := divisor(grad)) is None else x / by for x, grad in zip(own, some, strict=True)]
            lengths.append(total(torch._foreach_mul(own, own), some).sum().sqrt())
    return lengths[0] if len(lengths) == 1 else nn.utils.get_total_norm(lengths)


def clip(parameters: Iterable[nn.Parameter], longest: float, norm: Tensor) -> None:
    """Shorten their gradients, whose `total_norm` is `norm`, to a length of at most `longest`."""
    parameters = [p for p in parameters if p.grad is not None]
    for some in by_kind(p for p in parameters if p.dtype not in HALVES):
        nn.utils.clip_grads_with_norm_(some, longest, norm)
    for grad in _apart(p.grad for p in parameters if p.grad is not None)[1]:
        divide(grad, ((norm + 1e-6) / longest).clamp_min(1))  # as torch has it


def _apart(gradients: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Those in 32 bits or more, and those in 16."""
    gradients = list(gradients)
    return [g for g in gradients if g.dtype not in HALVES], [g for g in gradients if g.dtype in HALVES]
