"""Gradient scales for backward passes in 16 bits: one for each resblock, or one for the loss.

Gradients of deep transformers span more powers of two than a 16-bit format has exponents: one scale for the whole loss
that avoids underflow in one block causes overflow in another (Ramesh et al. 2021, §2.4). Each kind of scaling is a hook
of the training loop: its state is part of each checkpoint, and the model is unchanged.

`PerBlockGradScaler` is Figure 4; x is a resblock's input and also its identity path, in fp32:

    forward      x ────────────────┬──────────────────────────────▶ + ─▶ x + branch(norm(x))
                                   └─▶ norm ─▶ branch (16 bits) ──▶ ┘
    backward     g ◀─ + ◀──────────┬──────────────────────────────── g
                      └ unscale ◀─ filter ◀─ 16 bits ◀─ filter ◀─ scale, cast to 16 bits ┘

The filter sets Inf and NaN to zero. Without it an overflow in one block would reach the identity path and lower the
scales of all earlier blocks. Parameter gradients of norm and branch are divided by the scale as part of gradient
averaging (`Reduction.scales`), before clipping. If a block's gradients are not all finite, its scale falls and the
update is skipped (App. D.1). `PartialGradScaler` leaves only that block out of the update.

Operations outside the resblocks are not scaled and computed in fp32: embeddings, output layers, the objective ("Only
use 16-bit precision where it is really necessary", D.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from limner import compat
from limner.blocks import resblocks
from limner.errors import UserError
from limner.numerics.formats import HALF_FORMATS, FloatFormat
from limner.numerics.precision import upcast
from limner.optim.dtensor import split_by_placement, sum_over_shards, to_local
from limner.quantization.simulated_gradients import simulate_cast
from limner.training.hooks import Hook
from limner.training.train_state import TrainState


class Scale(torch.autograd.Function):
    """Cast from 16 bits to fp32. The gradient is multiplied by `scale`, cast to `form` or else the format of the input,
    and filtered (`zero_nonfinite`).

    The output must be fp32 for its gradient to be fp32: autograd casts gradients to the format of their tensor.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, form: FloatFormat | None) -> Tensor:
        ctx.save_for_backward(scale)
        ctx.format, ctx.form = x.dtype, form
        return upcast(x).view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        scaled = upcast(grad) * ctx.saved_tensors[0]
        return zero_nonfinite(simulate_cast(scaled, ctx.form) if ctx.form else scaled.to(ctx.format)), None, None


class Unscale(torch.autograd.Function):
    """Identity; the gradient is filtered and divided by `scale`, in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return zero_nonfinite(upcast(grad)) / ctx.saved_tensors[0], None


def zero_nonfinite(x: Tensor) -> Tensor:
    """Replace Inf and NaN by zero."""
    return torch.where(x.isfinite(), x, 0)


class _Scaler(Hook):
    """A hook that divides gradients by `scales`, by parameter. `handles` multiply them in the backward pass."""

    def __init__(self, run: TrainState, scales: Mapping[Tensor, Tensor], handles: Sequence[RemovableHandle]) -> None:
        self._parallel, self._handles = run.parallel, handles
        run.parallel.reduction.scales |= scales

    def leave_out(self, run: TrainState, parameters: Sequence[nn.Parameter]) -> None:
        """Leave parameters out of the update."""
        run.parallel.reduction.restore_error_feedback(parameters)
        for p in parameters:
            p.grad = None

    def close(self) -> None:
        self._parallel.reduction.scales.clear()
        for handle in self._handles:
            handle.remove()


class PerBlockGradScaler(_Scaler):
    """One scale for each resblock (Figure 4, App. D.1), on the device of the model.

    With M processes the paper's scales are M times as large, because its loss is divided by the samples of all
    processes (D.3). Here the loss is the mean over one process's samples, which makes the factor unnecessary.

    Args:
        form: simulated format of gradients in a block computed in fp32 (`quantization/simulated_gradients.py`).

    Attributes:
        names: names of the R resblocks.
        scales: fp32 [R].
        skipped: number of updates in which gradients of each block were not finite, int64 [R].
    """

    INIT_SCALE, MIN_SCALE, MAX_SCALE = 2.0**13, 2.0**7, 2.0**24
    GROWTH, BACKOFF = 2 ** (1 / 1_000), 2**0.5  # multiplies after finite gradients; divides after others
    BACKOFF_INTERVAL = 125  # least number of updates between two decreases of a scale
    leaves_out_blocks = False  # if not, the training loop skips an update whose gradients are not finite
    saved = ("scales", "last_backoff", "skipped")

    def __init__(self, run: TrainState, form: FloatFormat | None = None) -> None:
        blocks: dict[str, Any] = resblocks(run.model)
        if not blocks:
            name = type(run.model).__name__
            raise UserError(f"a {name} lacks resblocks: choose another value for scaling than resblocks")
        self.names = list(blocks)
        self.scales = torch.full((len(blocks),), self.INIT_SCALE, dtype=torch.float32, device=run.device)
        self.last_backoff = torch.full((len(blocks),), -self.BACKOFF_INTERVAL, device="cpu")  # step of the decrease
        self.skipped = torch.zeros(len(blocks), dtype=torch.int64, device="cpu")
        self.blocks: list[nn.Module] = list(blocks.values())  # whose parameters a pipeline may replace
        divisors: dict[Tensor, Tensor] = {}
        handles = _run_within(run.trainable, partial(torch.autocast, run.device.type, enabled=False))
        for i, block in enumerate(blocks.values()):
            scaled = [*block.norm.parameters(), *block.branch.parameters()]  # a layer scale's gain is outside
            divisors |= dict.fromkeys(scaled, self.scales[i])
            handles += [
                *_run_within(block, partial(run.config.precision.autocast, run.device)),
                block.norm.register_forward_pre_hook(lambda _, args, i=i: (Unscale.apply(args[0], self.scales[i]),)),
                block.branch.register_forward_hook(lambda _, args, out, i=i: Scale.apply(out, self.scales[i], form)),
            ]
        super().__init__(run, divisors, handles)

    def after_backward(self, run: TrainState) -> None:
        parameters = [[p for p in block.parameters() if p.requires_grad] for block in self.blocks]
        sums = run.parallel.sum_over_stages(torch.stack([_l1_norms(part, self.scales).sum() for part in parameters]))
        finite = [math.isfinite(value) for value in sums.tolist()]
        scales = self.scales.tolist()
        for i, part in enumerate(parameters):
            if finite[i]:
                scales[i] *= self.GROWTH
            else:
                if self.leaves_out_blocks:
                    self.leave_out(run, part)
                self.skipped[i] += 1
                if run.step - int(self.last_backoff[i]) >= self.BACKOFF_INTERVAL:
                    scales[i] /= self.BACKOFF
                    self.last_backoff[i] = run.step
        self.scales.copy_(torch.tensor(scales, dtype=torch.float32).clamp(self.MIN_SCALE, self.MAX_SCALE))

    def before_log(self, run: TrainState, row: dict[str, Any]) -> None:
        logs = self.scales.log2()
        row |= {"scale/lowest": logs.min().item(), "scale/highest": logs.max().item()}
        row["scale/skipped"] = int(self.skipped.sum())


class PartialGradScaler(PerBlockGradScaler):
    """One scale for each resblock. If gradients of a block are not finite, the update leaves out only this block: small
    batches lose less of an update, at the price of blocks whose updates follow different numbers of batches."""

    leaves_out_blocks = True


def _run_within(module: nn.Module, context: Callable[[], AbstractContextManager[object]]) -> list[RemovableHandle]:
    """Run each forward pass of a module within a context, until the handles are removed."""
    entered: list[AbstractContextManager[object]] = []

    def enter(*_: Any) -> None:
        entered.append(context())
        entered[-1].__enter__()

    def leave(*_: Any) -> None:
        entered.pop().__exit__(None, None, None)

    return [
        module.register_forward_pre_hook(enter, prepend=True),
        module.register_forward_hook(leave, always_call=True),  # also on errors: recomputation ends by raising one
    ]


def _l1_norms(parameters: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the L1 norm of each gradient, [n] on the device of `like`; it is finite if all values are."""
    grads = [p.grad for p in parameters if p.grad is not None]
    dtype = torch.float32 if any(grad.dtype in HALF_FORMATS for grad in grads) else None  # sums overflow fp16
    norms: dict[int, Tensor] = {}
    for same_kind in split_by_placement(grads):
        sums = sum_over_shards(compat.foreach_norm([to_local(grad) for grad in same_kind], 1, dtype), same_kind)
        norms |= zip(map(id, same_kind), sums, strict=True)
    return torch.stack([norms[id(grad)] for grad in grads]) if grads else like.new_zeros(0)


class _LossScaler(_Scaler):
    """Multiplies the loss by a scale in the backward pass."""

    INIT_SCALE = 2.0**16

    def __init__(self, run: TrainState) -> None:
        self.parameters, self.skipped = run.parameters, 0
        self.scale = torch.tensor(self.INIT_SCALE, dtype=torch.float32, device=run.device)
        handle = run.trainable.register_forward_hook(
            lambda _, args, out: (Scale.apply(out[0], self.scale, None), out[1])
        )
        super().__init__(run, dict.fromkeys(self.parameters, self.scale), [handle])


class DynamicLossScaler(_LossScaler):
    """One scale for the whole loss, which grows until gradients overflow (Micikevicius et al. 2018).

    If any gradient is not finite, the whole update is skipped and the scale is halved.
    """

    GROWTH_INTERVAL = 2_000  # consecutive finite updates after which it doubles
    finite_steps = 0  # consecutive finite updates
    saved = ("scale", "finite_steps", "skipped")

    def after_backward(self, run: TrainState) -> None:
        if math.isfinite(_l1_norms(self.parameters, self.scale).sum().item()):
            self.finite_steps += 1
            if self.finite_steps % self.GROWTH_INTERVAL == 0:
                self.scale.mul_(2).clamp_(max=2.0**127)  # Inf would never decrease if gradients are always finite
        else:  # the loop skips the update
            self.finite_steps, self.skipped = 0, self.skipped + 1
            self.scale.div_(2)

    def before_log(self, run: TrainState, row: dict[str, Any]) -> None:
        row |= {"scale": math.log2(self.scale.item()), "scale/skipped": self.skipped}


class StaticLossScaler(_LossScaler):
    """A constant scale of the loss (Wortsman et al. 2023, App. G).

    Only tensors whose gradient is not finite are left out of the update. Spikes in one layer, most often the first,
    thus neither stop other layers nor lower the scale permanently.
    """

    saved = ("skipped",)

    def after_backward(self, run: TrainState) -> None:
        trained = [p for p in self.parameters if p.grad is not None]
        norms = _l1_norms(self.parameters, self.scale).tolist()
        overflowed = [p for p, norm in zip(trained, norms, strict=True) if not math.isfinite(norm)]
        self.leave_out(run, overflowed)
        self.skipped += len(overflowed)

    def before_log(self, run: TrainState, row: dict[str, Any]) -> None:
        row["scale/skipped"] = self.skipped


def scaling(run: TrainState) -> list[Hook]:
    """Return the hooks for `config.scaling`."""
    scalers: dict[str, Callable[[TrainState], Hook]] = {
        "resblocks": PerBlockGradScaler, "resblocks-partial": PartialGradScaler,
        "loss": DynamicLossScaler, "tensors": StaticLossScaler,
    }  # fmt: skip
    return [scalers[run.config.scaling](run)] if run.config.scaling in scalers else []
