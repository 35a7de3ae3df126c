"""AdamW with beta2 = 1 - t^-lambda at step t, the schedule of AdaFactor and PaLM.

limner has it for comparison; it does not improve accuracy in Wortsman et al. 2023 (Figure 14). The first step has
beta2 = 0, so the running variance is a weighted average of squares from then on, without bias to correct (Shazeer &
Stern 2018, §7.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from limner.optim.adam_base import MomentOptimizer, StepTensors, adamw_, bias_corrections


class Beta2WarmupAdamW(MomentOptimizer):
    """AdamW with a beta2 schedule. `power` is lambda: 0.45, 0.5 and 0.65 in the paper, 0.8 in AdaFactor."""

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

    def _update(self, group: Mapping[str, Any], params: list[Tensor], inputs: StepTensors, counts: list[int]) -> None:
        n, (beta1, *_) = len(counts), group["betas"]  # a state loaded from AdamW has two betas
        adamw_(
            inputs, lrs=[group["lr"]] * n,
            betas=(beta1, [1 - count ** -group["power"] for count in counts]),
            corrections=(bias_corrections(beta1, counts), [1.0] * n), eps=group["eps"],
            weight_decay=group["weight_decay"],
        )  # fmt: skip
