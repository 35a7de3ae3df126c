"""Muon (Jordan et al. 2024): momentum whose singular values are brought near one.

torch has this optimiser; its updates are these (tests/reference/test_muon.py). Here matrices of one
shape are orthogonalised together, which halves the time of a step for models of some million
parameters, whose matrices are too small to keep the machine busy one by one.

A matrix that several processes share is gathered, since singular values are those of the whole: each process computes
the whole update and keeps its part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from limner.optim.adam_base import refuse_halves, require
from limner.optim.dtensor import like, whole

_STEPS = 5
_QUINTIC = (3.4445, -4.7750, 2.0315)  # steep at zero; brings singular values to about 0.7 .. 1.2 in five steps


def orthogonalize(matrices: Tensor) -> Tensor:
    """Newton-Schulz iteration: [N, rows, columns] -> the same with singular values near 1.

    In fp32, or under `torch.autocast` in its 16 bits, which is enough (Jordan et al. 2024): then so is the result.
    """
    a, b, c = _QUINTIC
    tall, device = matrices.shape[1] > matrices.shape[2], matrices.device.type
    x = matrices.float()
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)  # no singular value above 1
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    if x.dtype == torch.float32 and x.shape[2] >= 2 * x.shape[1]:
        x = _steps(x @ x.mT) @ x
    else:
        for _ in range(_STEPS):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _steps(gram: Tensor) -> Tensor:
    """What all steps multiply x by, found from x x^T alone, [N, m, m]: each multiplies by a polynomial p of its x x^T,
    which becomes p x x^T p. For wide matrices this is half of the work. It squares singular values, which fp32 has the
    digits for: it differs by less than 1e-3 where they span six decimals. 16 bits have not."""
    a, b, c = _QUINTIC
    product = gram
    for step in range(_STEPS):
        p = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        p.diagonal(dim1=1, dim2=2).add_(a)
        product = p @ product if step else p
        if step < _STEPS - 1:
            gram = p @ (gram @ p)
    return product


class Muon(torch.optim.Optimizer):
    """For matrices only. An update is `lr * sqrt(max(1, rows / columns))` times the orthogonalised
    Nesterov momentum; weight decay is decoupled. A step under `torch.autocast` multiplies matrices in 16 bits."""

    def __init__(
        self, params: Iterable[Any], lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch. Raises `ValueError` for what is no matrix, and for settings that cannot be."""
        require(self.defaults | param_group)
        super().add_param_group(param_group)
        if any(p.ndim != 2 for p in param_group["params"]):
            raise ValueError("Muon updates matrices: parameters of two dimensions")
        refuse_halves("Muon", param_group["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of every parameter that has a gradient. There is no closure to call."""
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            alike: defaultdict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    alike[p.shape].append((p, p.grad))
            for shape, pairs in alike.items():
                updates = orthogonalize(torch.stack([whole(self._direction(p, grad, momentum)) for p, grad in pairs]))
                scale = max(1, shape[0] / shape[1]) ** 0.5
                for (p, _), update in zip(pairs, updates.to(pairs[0][1].dtype), strict=True):
                    p.mul_(1 - lr * group["weight_decay"]).add_(like(update, p), alpha=-lr * scale)

    def _direction(self, p: Tensor, grad: Tensor, momentum: float) -> Tensor:
        """Nesterov's momentum, after the gradient has joined it."""
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer = state["momentum_buffer"].lerp_(grad, 1 - momentum)
        return grad.lerp(buffer, momentum)
