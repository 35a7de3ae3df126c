"""StableAdamW: AdamW with update clipping (Wortsman et al. 2023, §3.5, App. F).

A loss spikes a few steps after a gradient has grown faster than u, the running average of its squares: then
g / sqrt(u) is far above 1 and the update is too large. Algorithm 2 measures that for each tensor and divides the
learning rate of the tensor by it:

    RMS_t = sqrt(mean(g^2 / max(u_t, eps^2)))            (F.2: the maximum avoids division by zero)
    eta_t = lr / max(1, RMS_t)
    p <- p - eta_t weight_decay p - eta_t v_t / (sqrt(u_t) + eps)

where v and u are bias-corrected averages of g and g^2. The algorithm puts the correction into its coefficients. This
code stores Adam's moments and corrects them on use, which is equivalent (footnote 1 of the paper) and keeps the state
of torch's AdamW.

Published versions differ. The paper's Algorithm 2 decays weights with eta_t, the default here. The code of its authors
decays them with lr, independent of RMS_t: `clip_decay=False`.

On a CPU the update is torch's fused AdamW with the learning rate of each tensor, and RMS_t takes one more pass over
gradients and variances. Elsewhere both are a few calls for many tensors, and the host never waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from limner import compat
from limner.numerics.compile_elementwise import CompiledElementwise
from limner.optim.adam_base import SMALLEST_NORMAL, MomentOptimizer, StepTensors, adamw_
from limner.optim.dtensor import mean_over_shards


class StableAdamW(MomentOptimizer):
    """StableAdamW as a torch optimizer.

    Args:
        params: tensors or groups.
        lr, betas, eps, weight_decay: as in torch's AdamW; eps is also the floor of sqrt(u_t) in RMS_t. The defaults
            are the paper's.
        clip_decay: decay weights with the clipped learning rate (Algorithm 2).
        quantize_state: store moments in 16 bits (`optim/adam_base.py`); groups may differ.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 2e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-6,
        weight_decay: float = 0.2,
        clip_decay: bool = True,
        quantize_state: bool = False,
    ) -> None:
        self._rms: list[tuple[list[Tensor], Tensor]] = []
        super().__init__(params, lr, betas, eps, weight_decay, clip_decay=clip_decay, quantize_state=quantize_state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._rms = []  # holds parameters of the original, not of the copy

    def step(self, closure: Any = None) -> Any:
        """Update as `MomentOptimizer.step` does, and record RMS_t for `rms`."""
        self._rms = []
        return super().step(closure)

    def rms(self, named: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
        """RMS_t of tensors in the last step by name, before clipping: `rms(model.named_parameters())`.

        Tensors without gradient are left out. The call waits for the device once.
        """
        if not self._rms:
            return {}
        names = {p: name for name, p in named}
        recorded = [p for params, _ in self._rms for p in params]
        values = torch.cat([values.to(self._rms[0][1]) for _, values in self._rms]).tolist()
        return {names[p]: value for p, value in zip(recorded, values, strict=True) if p in names}

    def _update(self, group: Mapping[str, Any], params: list[Tensor], inputs: StepTensors, counts: list[int]) -> None:
        coefficients, lr, decay = self.coefficients(group, counts), group["lr"], group["weight_decay"]
        beta1, beta2 = group["betas"]
        rms = update_rms(params, inputs, beta2, coefficients.c2, group["eps"])
        self._rms.append((params, rms))
        lrs = lr / rms.clamp_min(1)
        if not group["clip_decay"]:
            compat.foreach_mul_(inputs.params, 1 - lr * decay)
            decay = 0.0
        weights, grads, exp_avgs, exp_avg_sqs, use_triton = inputs
        if use_triton or not all(map(supports_fused, weights, grads, exp_avgs, exp_avg_sqs)):
            adamw_(inputs, lrs, coefficients, group["eps"], decay)
            return
        steps = {count: torch.tensor(count, dtype=torch.float32, device="cpu") for count in set(counts)}
        for i, (tensor_lr, count) in enumerate(zip(lrs.tolist(), counts, strict=True)):
            compat.fused_adamw_(
                [weights[i]], [grads[i]], [exp_avgs[i]], [exp_avg_sqs[i]], [], [steps[count]], lr=tensor_lr,
                beta1=beta1, beta2=beta2, weight_decay=decay, eps=group["eps"], amsgrad=False, maximize=False,
            )  # fmt: skip


def supports_fused(p: Tensor, *others: Tensor) -> bool:
    """Return True if torch's fused loop, which ignores strides, can update these tensors."""
    return p.device.type == "cpu" and all(x.dtype == p.dtype and x.stride() == p.stride() for x in others)


def update_rms(params: list[Tensor], inputs: StepTensors, beta2: float, c2: list[float], eps: float) -> Tensor:
    """RMS_t of n tensors, [n], from their local shards. `inputs` holds the variances before the step, RMS_t uses those
    after it. c2 = 1 - beta2^t corrects the bias."""
    grads, exp_avg_sqs = inputs.grads, inputs.exp_avg_sqs
    floors = [max(eps**2 * c, SMALLEST_NORMAL) for c in c2]
    if inputs.use_triton:
        from limner.optim import triton_adamw

        sums = list(triton_adamw.sums_of_ratios(grads, exp_avg_sqs, beta2, floors).unbind())
    elif len(grads) == 1 and _sum_of_squares.compiles(grads[0]):
        constants = torch.stack([exp_avg_sqs[0].new_full((), constant) for constant in (beta2, floors[0])])
        sums = [_sum_of_squares(grads[0], exp_avg_sqs[0], constants)]
    else:
        squares = compat.foreach_mul(grads, grads)
        updated = compat.foreach_lerp(exp_avg_sqs, squares, 1 - beta2)
        compat.foreach_clamp_min_(updated, floors)
        compat.foreach_div_(squares, updated)
        sums = [square.sum() for square in squares]
    compat.foreach_mul_(sums, c2)
    return mean_over_shards(sums, params).sqrt_()


def _sum_of_squares_of(grad: Tensor, exp_avg_sq: Tensor, constants: Tensor) -> Tensor:
    beta2, floor = constants
    square = grad * grad
    return (square / torch.maximum(beta2 * exp_avg_sq + (1 - beta2) * square, floor)).sum()


_sum_of_squares = CompiledElementwise(_sum_of_squares_of)
