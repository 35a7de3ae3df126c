"""Gradient scales for backward passes in 16 bits: one for each resblock, or one for the loss.

Gradients of deep transformers span more powers of two than a 16-bit format has exponents: one scale for the whole loss
that avoids underflow in one block causes overflow in another (Ramesh et al. 2021, §2.4). Each kind of scaling is a hook
of the training loop: its state is part of each checkpoint, and the model is unchanged.

`ResblockScales` is Figure 4; x is a resblock's input and also its identity path, in fp32:

    forward      x ────────────────┬──────────────────────────────▶ + ─▶ x + branch(norm(x))
                                   └─▶ norm ─▶ branch (16 bits) ──▶ ┘
    backward     g ◀─ + ◀──────────┬──────────────────────────────── g
                      └ unscale ◀─ filter ◀─ 16 bits ◀─ filter ◀─ scale, cast to 16 bits ┘

The filter sets Inf and NaN to zero. Without it an overflow in one block would reach the identity path and lower the
scales of all earlier blocks. Parameter gradients of norm and branch are divided by the scale as part of gradient
averaging (`Parallel.unscale`), before clipping. If a block's gradients are not all finite, only this block is left
out of the update.

Operations outside the resblocks are not scaled and computed in fp32: embeddings, output layers, the objective ("Only
use 16-bit precision where it is really necessary", D.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from limner.errors import UserError
from limner.layers.simulated_gradients import simulate_cast
from limner.models.transformer import Resblock
from limner.numerics.formats import HALF_FORMATS, FloatFormat
from limner.numerics.precision import upcast
from limner.optim.dtensor import split_by_placement, sum_over_shards, to_local
from limner.training.hooks import Hook
from limner.training.train_state import Run


class _Scaled(torch.autograd.Function):
    """Cast from 16 bits to fp32. The gradient is multiplied by `scale`, cast to `form` or else the format of the input,
    and filtered.

    The output must be fp32 for its gradient to be fp32: autograd casts gradients to the format of their tensor.
    """

    @staticmethod
    def forward(x: Tensor, scale: Tensor, form: FloatFormat | None) -> Tensor:
        return upcast(x).view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, scale, ctx.form = inputs
        ctx.save_for_backward(scale)
        ctx.format = x.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        scaled = upcast(grad) * ctx.saved_tensors[0]
        return filtered(simulate_cast(scaled, ctx.form) if ctx.form else scaled.to(ctx.format)), None, None


class _Unscaled(torch.autograd.Function):
    """Identity; the gradient is filtered and divided by `scale`, in fp32."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return filtered(upcast(grad)) / ctx.saved_tensors[0], None


def filtered(x: Tensor) -> Tensor:
    """Replace Inf and NaN by zero."""
    return torch.where(x.isfinite(), x, 0)


def resblocks(model: nn.Module) -> dict[str, Resblock]:
    """Return the resblocks of a model by name. Raises `UserError` without resblocks."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, Resblock)}
    if not found:
        raise UserError(f"a {type(model).__name__} has no resblocks: give it another scaling than resblocks")
    return found


class ResblockScales(Hook):
    """One scale for each resblock (Figure 4, App. D.1), on the device of the model.

    With M processes the paper's scales are M times as large, because its loss is divided by the samples of all
    processes (D.3). Here the loss is the mean over one process's samples, which makes the factor unnecessary.

    Args:
        form: simulated format of gradients in a block computed in fp32 (`layers/simulated_gradients.py`).

    Attributes:
        names: names of the R resblocks.
        scales: fp32 [R].
        skipped: number of updates that left out each block, int64 [R].
    """

    FIRST, LOWEST, HIGHEST = 2.0**13, 2.0**7, 2.0**24
    GROWTH, FALL = 2 ** (1 / 1_000), 2**0.5  # multiplies after finite gradients; divides after others
    WINDOW = 125  # least number of updates between two falls of a scale

    def __init__(self, run: Run, form: FloatFormat | None = None) -> None:
        blocks = resblocks(run.model)
        self.names = list(blocks)
        self.scales = torch.full((len(blocks),), self.FIRST, dtype=torch.float32, device=run.device)
        self.fell = torch.full((len(blocks),), -self.WINDOW, device="cpu")  # step of the last fall
        self.skipped = torch.zeros(len(blocks), dtype=torch.int64, device="cpu")
        self.parameters = [[p for p in block.parameters() if p.requires_grad] for block in blocks.values()]
        self.ends = ExitStack()
        handles = _around(run.trainable, partial(torch.autocast, run.device.type, enabled=False))
        for i, block in enumerate(blocks.values()):
            scaled = [*block.norm.parameters(), *block.branch.parameters()]  # a layer scale's gain is outside
            run.parallel.unscale(scaled, self.scales[i])
            self.ends.callback(run.parallel.unscale, scaled, None)
            handles += [
                *_around(block, partial(run.config.precision.autocast, run.device)),
                block.norm.register_forward_pre_hook(lambda _, args, i=i: (_Unscaled.apply(args[0], self.scales[i]),)),
                block.branch.register_forward_hook(lambda _, args, out, i=i: _Scaled.apply(out, self.scales[i], form)),
            ]
        for handle in handles:
            self.ends.callback(handle.remove)

    def after_backward(self, run: Run) -> None:
        sums = torch.stack([_sizes(block, self.scales).sum() for block in self.parameters])
        finite = [math.isfinite(value) for value in sums.tolist()]
        scales = self.scales.tolist()
        for i, block in enumerate(self.parameters):
            if finite[i]:
                scales[i] *= self.GROWTH
            else:
                run.parallel.put_back(block)
                for p in block:
                    p.grad = None
                self.skipped[i] += 1
                if run.step - int(self.fell[i]) >= self.WINDOW:
                    scales[i] /= self.FALL
                    self.fell[i] = run.step
        self.scales.copy_(torch.tensor(scales, dtype=torch.float32).clamp(self.LOWEST, self.HIGHEST))

    def on_report(self, run: Run, row: dict[str, Any]) -> None:
        logs = self.scales.log2()
        row |= {"scale/lowest": logs.min().item(), "scale/highest": logs.max().item()}
        row["scale/skipped"] = int(self.skipped.sum())

    def close(self) -> None:
        self.ends.close()

    def state_dict(self) -> dict[str, Any]:
        return {"scales": self.scales, "fell": self.fell, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in self.state_dict().items():
            value.copy_(state[name])


def _around(module: nn.Module, context: Callable[[], AbstractContextManager[object]]) -> list[RemovableHandle]:
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


def _sizes(parameters: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the L1 norm of each gradient, [n] on the device of `like`; it is finite if all values are."""
    grads = [p.grad for p in parameters if p.grad is not None]
    format = torch.float32 if any(grad.dtype in HALF_FORMATS for grad in grads) else None  # sums overflow fp16
    found: dict[int, Tensor] = {}
    for some in split_by_placement(grads):
        if some:
            sums = sum_over_shards(torch._foreach_norm([to_local(grad) for grad in some], 1, format), some)
            found |= zip(map(id, some), sums, strict=True)
    return torch.stack([found[id(grad)] for grad in grads]) if grads else like.new_zeros(0)


class _OfLoss(Hook):
    """Multiplies the loss by a scale in the backward pass, and registers the division of all gradients by it."""

    FIRST = 2.0**16

    def __init__(self, run: Run) -> None:
        self.parameters, self.parallel, self.skipped = run.parameters, run.parallel, 0
        self.scale = torch.tensor(self.FIRST, dtype=torch.float32, device=run.device)
        self.parallel.unscale(self.parameters, self.scale)
        self.handle = run.trainable.register_forward_hook(
            lambda _, args, found: (_Scaled.apply(found[0], self.scale, None), found[1])
        )

    def close(self) -> None:
        self.handle.remove()
        self.parallel.unscale(self.parameters, None)


class LossScale(_OfLoss):
    """One scale for the whole loss, which grows until gradients overflow (Micikevicius et al. 2018).

    If any gradient is not finite, the whole update is skipped and the scale is halved.
    """

    EVERY = 2_000  # consecutive finite updates after which it doubles
    good = 0  # consecutive finite updates

    def after_backward(self, run: Run) -> None:
        if math.isfinite(_sizes(self.parameters, self.scale).sum().item()):
            self.good += 1
            if self.good % self.EVERY == 0:
                self.scale.mul_(2).clamp_(max=2.0**127)  # Inf would never decrease if gradients are always finite
        else:  # the loop skips the update
            self.good, self.skipped = 0, self.skipped + 1
            self.scale.div_(2)

    def on_report(self, run: Run, row: dict[str, Any]) -> None:
        row |= {"scale": math.log2(self.scale.item()), "scale/skipped": self.skipped}

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good": self.good, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale.copy_(state["scale"])
        self.good, self.skipped = int(state["good"]), int(state["skipped"])


class TensorScale(_OfLoss):
    """A constant scale of the loss (Wortsman et al. 2023, App. G).

    Only tensors whose gradient is not finite are left out of the update. Spikes in one layer, most often the first,
    thus neither stop other layers nor lower the scale permanently.
    """

    def after_backward(self, run: Run) -> None:
        there = [p for p in self.parameters if p.grad is not None]
        sizes = _sizes(self.parameters, self.scale).tolist()
        wrong = [p for p, size in zip(there, sizes, strict=True) if not math.isfinite(size)]
        run.parallel.put_back(wrong)
        for p in wrong:
            p.grad = None
        self.skipped += len(wrong)

    def on_report(self, run: Run, row: dict[str, Any]) -> None:
        row["scale/skipped"] = self.skipped

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.skipped = int(state["skipped"])


def scaling(run: Run) -> list[Hook]:
    """Return the hooks for `config.scaling`."""
    kinds = {"resblocks": ResblockScales, "loss": LossScale, "tensors": TensorScale}
    return [kinds[run.config.scaling](run)] if run.config.scaling in kinds else []
