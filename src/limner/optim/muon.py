"""Muon (Jordan et al. 2024): updates are the momentum with its singular values brought near one.

torch has this optimizer, with equal updates (tests/reference/test_muon.py). This version orthogonalizes all matrices
of one shape in a batch, which halves the time of a step for models of a few million parameters: their matrices are too
small to keep the hardware busy one at a time.

Sharded matrices are gathered, because singular values belong to the full matrix: each process computes the full update
and keeps its shard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from limner.optim.adam_base import CheckedOptimizer
from limner.optim.dtensor import full_tensor, shard_like

_NEWTON_SCHULZ_STEPS = 5
_QUINTIC = (3.4445, -4.7750, 2.0315)  # steep at zero; brings singular values to about 0.7 .. 1.2 in five steps


def orthogonalize(matrices: Tensor) -> Tensor:
    """Bring singular values near 1 by Newton-Schulz iteration: [N, rows, columns] -> [N, rows, columns].

    Products are fp32 or, under `torch.autocast`, in its 16-bit dtype, which suffices (Jordan et al. 2024) and is then
    the dtype of the result.
    """
    a, b, c = _QUINTIC
    tall, device = matrices.shape[1] > matrices.shape[2], matrices.device.type
    x = matrices.float()
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)  # bounds singular values by 1
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    if x.dtype == torch.float32 and x.shape[2] >= 2 * x.shape[1]:
        x = _product_of_steps(x @ x.mT) @ x
    else:
        for _ in range(_NEWTON_SCHULZ_STEPS):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _product_of_steps(gram: Tensor) -> Tensor:
    """Product of the factors by which all steps multiply x, from the Gram matrix x x^T alone: [N, m, m].

    Each step multiplies x by a polynomial p of x x^T, and x x^T becomes p x x^T p. For wide matrices this halves the
    work. Squared singular values need fp32: the result differs by less than 1e-3 where they span six decimals.
    """
    a, b, c = _QUINTIC
    product = gram
    for step in range(_NEWTON_SCHULZ_STEPS):
        p = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        p.diagonal(dim1=1, dim2=2).add_(a)
        product = p @ product if step else p
        if step < _NEWTON_SCHULZ_STEPS - 1:
            gram = p @ (gram @ p)
    return product


class Muon(CheckedOptimizer):
    """Muon as a torch optimizer, for matrices only. An update is `lr * sqrt(max(1, rows / columns))` times the
    orthogonalized Nesterov momentum. Weight decay is decoupled. `torch.autocast` makes products of a step 16-bit."""

    def __init__(
        self, params: Iterable[Any], lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as `CheckedOptimizer` does. Raises `ValueError` for parameters that are not matrices."""
        super().add_param_group(param_group)
        if any(p.ndim != 2 for p in param_group["params"]):
            raise ValueError("Muon updates only matrices: give it parameters of two dimensions")

    def _step_group(self, group: Mapping[str, Any], params: list[Tensor]) -> None:
        lr, momentum = group["lr"], group["momentum"]
        by_shape: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
        for p in params:
            by_shape[p.shape].append(p)
        for shape, matrices in by_shape.items():
            momenta = []
            for p in matrices:
                grad: Any = p.grad
                if not (state := self.state[p]):
                    state["momentum_buffer"] = torch.zeros_like(p)
                buffer = state["momentum_buffer"].lerp_(grad, 1 - momentum)
                momenta.append(full_tensor(grad.lerp(buffer, momentum)))
            updates = orthogonalize(torch.stack(momenta)).to(matrices[0].dtype)
            scale = max(1, shape[0] / shape[1]) ** 0.5
            for p, update in zip(matrices, updates, strict=True):
                p.mul_(1 - lr * group["weight_decay"]).add_(shard_like(update, p), alpha=-lr * scale)
