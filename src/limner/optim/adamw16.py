"""AdamW with moments in 16 bits, as Ramesh et al. 2021 trained the prior (App. B.2 and D).

`numerics/formats.py` defines the formats, `optim/adam_base.py` stores moments in them. "We clip the estimate for
running variance by value to 5 before it is used to update the parameters or moments" (B.2): the clip acts on the
running variance before bias correction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from limner.optim.adam_base import MomentOptimizer, StepTensors, adamw_, bias_corrections


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

    def _update(self, group: Mapping[str, Any], params: list[Tensor], inputs: StepTensors, counts: list[int]) -> None:
        n, (beta1, beta2) = len(counts), group["betas"]
        adamw_(
            inputs, lrs=[group["lr"]] * n, betas=(beta1, [beta2] * n),
            corrections=(bias_corrections(beta1, counts), bias_corrections(beta2, counts)), eps=group["eps"],
            weight_decay=group["weight_decay"], max_exp_avg_sq=group["max_exp_avg_sq"],
        )  # fmt: skip
