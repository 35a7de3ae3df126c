"""AdamW whose beta2 is 1 - t^-lambda at step t, as AdaFactor and PaLM have it.

It is here to be compared (Wortsman et al. 2023, Figure 14, where it does not improve accuracy). The first step forgets
all (beta2 = 0), so that the running variance is an average of squares from then on and needs no correction of its bias
(Shazeer & Stern 2018, §7.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from limner.optim.adam_base import MomentOptimizer, StepTensors, adamw_, corrections


class Beta2WarmupAdamW(MomentOptimizer):
    """A torch optimiser. `power` is lambda: the paper tries 0.45, 0.5 and 0.65, AdaFactor has 0.8."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        beta1: float = 0.9,
        power: float = 0.5,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr, (beta1,), eps, weight_decay, power=power)

    def _update(self, group: Mapping[str, Any], whole: list[Tensor], given: StepTensors, counts: list[int]) -> None:
        n, (beta1, *_) = len(counts), group["betas"]  # of which AdamW has saved two
        adamw_(
            given, rates=[group["lr"]] * n,
            betas=(beta1, [1 - count ** -group["power"] for count in counts]),
            corrections=(corrections(beta1, counts), [1.0] * n), eps=group["eps"], weight_decay=group["weight_decay"],
        )  # fmt: skip
