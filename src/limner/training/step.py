"""One step of training: the gradients of a batch, clipping, the update.

The loop and all timing of training call `update`. Objectives receive steps counted from 0;
after the update `run.step` is the number of updates done.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from limner.optim.grad_access import clip_grads_with_norm
from limner.optim.schedules import cooldown, warmup
from limner.spans import span
from limner.training.hooks import Hook
from limner.training.train_module import Batch
from limner.training.train_state import TrainState


def update(run: TrainState, batch: Batch, hooks: Sequence[Hook] = ()) -> dict[str, Tensor]:
    """Run one optimizer step; return the metrics of this process's batch, "loss" first.

    An update whose loss or gradient is not finite is skipped and counted. Raises `Diverged` after
    `config.max_bad_steps` consecutive updates that are skipped or have a loss out of range.
    """
    config, parallel = run.config, run.parallel
    for hook in hooks:
        hook.before_step(run)
    ramp = warmup(run.step, config.warmup_steps) * cooldown(run.step, config.steps, config.cooldown_steps)
    factor = ramp * run.schedule.factor(run.step - config.warmup_steps)
    run.lr = config.optimizer.lr * factor
    rows = len(next(iter(batch.values())))
    metrics = parallel.gradients(run, batch)
    with span("reduction"):
        parallel.reduce(run.parameters)
    for hook in hooks:
        hook.after_backward(run)
    norm = parallel.grad_norm(run.parameters)
    # The only synchronization with the device in a step.
    run.loss, run.norm = torch.stack([parallel.mean(metrics["loss"]), norm]).tolist()
    finite = math.isfinite(run.loss) and math.isfinite(run.norm)
    if finite:
        with span("update"):
            for part in parallel.reduction.parts(run.parameters):
                if config.clip_norm is not None:
                    clip_grads_with_norm(part, config.clip_norm, norm)
                for hook in hooks:
                    hook.before_update(run)
                _apply_gradients(run, factor)
            if constrain := getattr(run.model, "constrain", None):
                constrain()
            if run.ema:
                run.ema.update(run.model, run.step + 1)
        run.schedule.observe(run.loss)
        run.initial_loss = run.loss if run.initial_loss is None else run.initial_loss
    else:
        parallel.reduction.restore_error_feedback(run.parameters)
        run.skipped += 1
        _discard_gradients(run)
    run.consecutive_bad_steps = run.consecutive_bad_steps + 1 if run.loss_exploded or not finite else 0
    run.step, run.samples = run.step + 1, run.samples + rows * parallel.data_shares
    for hook in hooks:
        hook.after_update(run)
    if run.consecutive_bad_steps >= config.max_bad_steps:
        raise run.diverged()
    return metrics


def _apply_gradients(run: TrainState, factor: float) -> None:
    """Update all parameters that have a gradient, with `factor` on the learning rates, and discard the gradients."""
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        with run.config.precision.autocast(run.device):  # Muon multiplies matrices
            optimizer.step()
    _discard_gradients(run)


def _discard_gradients(run: TrainState) -> None:
    for optimizer in run.optimizers:
        optimizer.zero_grad(set_to_none=True)
