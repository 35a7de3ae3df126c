"""AdamW with moments in 16 bits, and AdamW with a schedule of beta2.

`AdamW16` is the optimizer with which Ramesh et al. 2021 trained the prior (App. B.2 and D). `numerics/formats.py`
defines the formats, `optim/adam_base.py` stores moments in them. "We clip the estimate for running variance by value to
5 before it is used to update the parameters or moments" (B.2): the clip acts on the running variance before bias
correction.

`Beta2WarmupAdamW` has beta2 = 1 - t^-lambda at step t, the schedule of AdaFactor and PaLM. limner has it for
comparison; it does not improve accuracy in Wortsman et al. 2023 (Figure 14). The first step has beta2 = 0, so the
running variance is a weighted average of squares from then on, without bias to correct (Shazeer & Stern 2018, §7.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from limner.optim.adam_base import Coefficients, MomentOptimizer


class AdamW16(MomentOptimizer):
    """AdamW with half the state, as a torch optimizer.

    Args:
        params: tensors or groups. Moments of tensors with two dimensions or more take 16 bits, except in groups with
            `quantize_state=False`; put embeddings and output layers there (D.2). All other moments are fp32.
        lr, betas, eps, weight_decay: as in torch's AdamW; the defaults are the paper's.
        max_exp_avg_sq: upper bound of the running variance.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 4.5e-4,
        betas: tuple[float, float] = (0.9, 0.96),
        eps: float = 1e-8,
        weight_decay: float = 4.5e-2,
        max_exp_avg_sq: float = 5.0,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, max_exp_avg_sq=max_exp_avg_sq, quantize_state=True)


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

    def coefficients(self, group: Mapping[str, Any], counts: list[int]) -> Coefficients:
        beta1 = group["betas"][0]  # a state loaded from AdamW has two betas
        beta2 = [1 - count ** -group["power"] for count in counts]
        return Coefficients(beta1, beta2, [1 - beta1**count for count in counts], [1.0] * len(counts))
