"""Lion (Chen et al. 2023): the update of every parameter is the sign of a momentum, times the learning rate.

limner has Lion for comparison: it divides by no running variance, so it is "immune to the stuck-in-the-past scenario"
that precedes loss spikes of AdamW (Wortsman et al. 2023, App. F.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from limner import compat
from limner.optim.adam_base import check_settings, reject_half_weights, update_chunks


class Lion(torch.optim.Optimizer):
    """Lion as a torch optimizer.

        p <- p - lr (sign(beta1 m + (1 - beta1) g) + weight_decay p)
        m <- beta2 m + (1 - beta2) g

    Lion needs a learning rate 3 to 10 times smaller than AdamW's, with a weight decay larger by the same factor (§5).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch. Raises `ValueError` for settings out of range and for weights in 16 bits."""
        check_settings(self.defaults | param_group)
        super().add_param_group(param_group)
        reject_half_weights("Lion", param_group["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; return the loss of `closure`, which recomputes the gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for params in update_chunks(p for p in group["params"] if p.grad is not None):
                grads = [p.grad for p in params if p.grad is not None]
                for p in params:
                    self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                exp_avgs = [self.state[p]["exp_avg"] for p in params]
                updates = compat.foreach_lerp(exp_avgs, grads, 1 - beta1)
                compat.foreach_sign_(updates)
                compat.foreach_add_(updates, params, alpha=group["weight_decay"])
                compat.foreach_add_(params, updates, alpha=-group["lr"])
                compat.foreach_lerp_(exp_avgs, grads, 1 - beta2)
        return loss
