"""Lion (Chen et al. 2023): every parameter moves by the learning rate, in the direction of a momentum's sign.

It is here to be compared: "immune to the stuck-in-the-past scenario", as it divides by no running variance (Wortsman et
al. 2023, App. F.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from limner.optim.adam_base import refuse_halves, require, together


class Lion(torch.optim.Optimizer):
    """A torch optimiser.

        p <- p - lr (sign(beta1 m + (1 - beta1) g) + weight_decay p)
        m <- beta2 m + (1 - beta2) g

    Its learning rate is 3 to 10 times smaller than AdamW's, its decay as much larger (their §5).
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
        """As in torch. Raises `ValueError` for settings that cannot be."""
        require(self.defaults | param_group)
        super().add_param_group(param_group)
        refuse_halves("Lion", param_group["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient. A `closure` computes the loss anew, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for some in together(p for p in group["params"] if p.grad is not None):
                gradients = [p.grad for p in some if p.grad is not None]
                for p in some:
                    self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                momenta = [self.state[p]["exp_avg"] for p in some]
                updates = torch._foreach_lerp(momenta, gradients, 1 - beta1)
                torch._foreach_sign_(updates)
                torch._foreach_add_(updates, some, alpha=group["weight_decay"])
                torch._foreach_add_(some, updates, alpha=-group["lr"])
                torch._foreach_lerp_(momenta, gradients, 1 - beta2)
        return loss
