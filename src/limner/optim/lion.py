"""Lion (Chen et al. 2023): the update of every parameter is the sign of a momentum, times the learning rate.

limner has Lion for comparison: it divides by no running variance, so it is "immune to the stuck-in-the-past scenario"
that precedes loss spikes of AdamW (Wortsman et al. 2023, App. F.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from limner import compat
from limner.optim.adam_base import CheckedOptimizer, update_chunks


class Lion(CheckedOptimizer):
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

    def _step_group(self, group: Mapping[str, Any], params: list[Tensor]) -> None:
        beta1, beta2 = group["betas"]
        for chunk in update_chunks(params):
            grads = [p.grad for p in chunk]
            exp_avgs = [self.state[p].setdefault("exp_avg", torch.zeros_like(p)) for p in chunk]
            updates = compat.foreach_lerp(exp_avgs, grads, 1 - beta1)
            compat.foreach_sign_(updates)
            compat.foreach_add_(updates, chunk, alpha=group["weight_decay"])
            compat.foreach_add_(chunk, updates, alpha=-group["lr"])
            compat.foreach_lerp_(exp_avgs, grads, 1 - beta2)
