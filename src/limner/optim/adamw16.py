"""AdamW with its moments in 16 bits, as Ramesh et al. 2021 trained the prior (App. B.2 and D).

The formats are in `numerics/formats.py`, how moments are kept in `optim/adam_base.py`. "We clip the estimate for
running variance by value to 5 before it is used to update the parameters or moments" (B.2): the running variance
itself, before its bias is corrected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from limner.optim.adam_base import MomentOptimizer, StepTensors, adamw_, corrections


class AdamW16(MomentOptimizer):
    """A torch optimiser with half of AdamW's state.

    Args:
        params: tensors or groups. Moments of tensors with two dimensions or more take 16 bits, but for groups with
            `packed=False`, into which embeddings and output layers belong (D.2). All others stay in fp32.
        lr, betas, eps, weight_decay: as torch's AdamW has them; the defaults are the paper's.
        most: the largest running variance.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 4.5e-4,
        betas: tuple[float, float] = (0.9, 0.96),
        eps: float = 1e-8,
        weight_decay: float = 4.5e-2,
        most: float = 5.0,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, most=most, packed=True)

    def _update(self, group: Mapping[str, Any], whole: list[Tensor], given: StepTensors, counts: list[int]) -> None:
        n, (beta1, beta2) = len(counts), group["betas"]
        adamw_(
            given, rates=[group["lr"]] * n, betas=(beta1, [beta2] * n),
            corrections=(corrections(beta1, counts), corrections(beta2, counts)), eps=group["eps"],
            weight_decay=group["weight_decay"], most=group["most"],
        )  # fmt: skip
