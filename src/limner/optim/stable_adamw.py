"""StableAdamW: AdamW that slows down where its running variance is out of date (Wortsman et al. 2023, §3.5, App. F).

Loss spikes come a few steps after a gradient has grown faster than u, the average of its squares, has followed: then
g / sqrt(u) is far above 1. Algorithm 2 measures that for each tensor and divides its learning rate by it:

    RMS_t = sqrt(mean(g^2 / max(u_t, eps^2)))            (F.2: the maximum avoids a division by zero)
    eta_t = lr / max(1, RMS_t)
    p <- p - eta_t weight_decay p - eta_t v_t / (sqrt(u_t) + eps)

where v and u are averages of g and g^2 without bias. The algorithm has the correction in its coefficients; we keep
Adam's moments and correct them when they are used, which is the same (its footnote 1). So the state is torch's AdamW's.

Published versions differ. The paper's Algorithm 2 decays weights with eta_t, which is the default here. The code that
its authors published decays them with lr, whatever RMS_t is: `clip_decay=False`.

On a CPU the update itself is the loop of torch's fused AdamW, given the learning rate of each tensor; RMS_t is one more
pass over gradients and variances. Elsewhere both are a few calls for many tensors. The host never waits for a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from limner.numerics.compile_elementwise import Fused
from limner.optim.adam_base import SMALLEST, MomentOptimizer, StepTensors, adamw_, corrections
from limner.optim.dtensor import mean


class StableAdamW(MomentOptimizer):
    """A torch optimiser.

    Args:
        params: tensors or groups.
        lr, betas, eps, weight_decay: as torch's AdamW has them; eps is also the floor of sqrt(u_t) in RMS_t. The
            defaults are the paper's.
        clip_decay: decay weights with the clipped learning rate, too (Algorithm 2).
        packed: keep moments in 16 bits (`optim/adam_base.py`); groups may differ.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 2e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-6,
        weight_decay: float = 0.2,
        clip_decay: bool = True,
        packed: bool = False,
    ) -> None:
        self._rms: list[tuple[list[Tensor], Tensor]] = []
        super().__init__(params, lr, betas, eps, weight_decay, clip_decay=clip_decay, packed=packed)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._rms = []  # a copy's last step is nobody's

    def step(self, closure: Any = None) -> Any:
        """As `MomentOptimizer.step`; afterwards `rms` tells of this step."""
        self._rms = []
        return super().step(closure)

    def rms(self, named: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
        """RMS_t of the tensors in the last step by name, before it is clipped: `rms(model.named_parameters())`. What
        has had no gradient is left out. Waits for the device once."""
        if not self._rms:
            return {}
        names = {p: name for name, p in named}
        parameters = [p for some, _ in self._rms for p in some]
        values = torch.cat([values.to(self._rms[0][1]) for _, values in self._rms]).tolist()
        return {names[p]: value for p, value in zip(parameters, values, strict=True) if p in names}

    def _update(self, group: Mapping[str, Any], whole: list[Tensor], given: StepTensors, counts: list[int]) -> None:
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        c1, c2 = corrections(beta1, counts), corrections(beta2, counts)
        rms = root_mean_squares(whole, given, beta2, c2, group["eps"])
        self._rms.append((whole, rms))
        rates = lr / rms.clamp_min(1)
        if not group["clip_decay"]:
            torch._foreach_mul_(given.weights, 1 - lr * decay)
            decay = 0.0
        parameters, gradients, means, variances, at_once = given
        if at_once or not all(map(_alike, parameters, gradients, means, variances)):
            adamw_(
                given, rates=rates, betas=(beta1, [beta2] * len(c1)),
                corrections=(c1, c2), eps=group["eps"], weight_decay=decay,
            )  # fmt: skip
            return
        steps = {count: torch.tensor(count, dtype=torch.float32, device="cpu") for count in set(counts)}
        for i, (rate, count) in enumerate(zip(rates.tolist(), counts, strict=True)):
            torch._fused_adamw_(
                [parameters[i]], [gradients[i]], [means[i]], [variances[i]], [], [steps[count]],
                lr=rate, beta1=beta1, beta2=beta2, weight_decay=decay, eps=group["eps"], amsgrad=False, maximize=False,
            )  # fmt: skip


def _alike(p: Tensor, *others: Tensor) -> bool:
    """Whether torch's fused loop can take them: it goes through memory without regard to strides."""
    return p.device.type == "cpu" and all(x.dtype == p.dtype and x.stride() == p.stride() for x in others)


def root_mean_squares(whole: list[Tensor], given: StepTensors, beta2: float, c2: list[float], eps: float) -> Tensor:
    """RMS_t of n tensors, [n]. Variances are those before the step; c2 = 1 - beta2^t corrects the bias after it.
    Gradients and variances are this process's shards, or all, of the `whole` tensors."""
    gradients, variances = given.gradients, given.variances
    floors = [max(eps**2 * c, SMALLEST) for c in c2]
    if given.at_once:
        from limner.optim import triton_adamw

        sums = list(triton_adamw.sums_of_ratios(gradients, variances, beta2, floors).unbind())
    elif len(gradients) == 1 and _sum_of_squares.compiles(gradients[0]):
        constants = torch.stack([variances[0].new_full((), constant) for constant in (beta2, floors[0])])
        sums = [_sum_of_squares(gradients[0], variances[0], constants)]
    else:
        squares = torch._foreach_mul(gradients, gradients)
        new = torch._foreach_lerp(variances, squares, 1 - beta2)
        torch._foreach_clamp_min_(new, floors)
        torch._foreach_div_(squares, new)
        sums = [square.sum() for square in squares]
    torch._foreach_mul_(sums, c2)
    return mean(sums, whole).sqrt_()


def _sum_of_squares_of(gradient: Tensor, variance: Tensor, constants: Tensor) -> Tensor:
    beta2, floor = constants
    square = gradient * gradient
    return (square / torch.maximum(beta2 * variance + (1 - beta2) * square, floor)).sum()


_sum_of_squares = Fused(_sum_of_squares_of)
