"""The training configuration, and the settings that may change when a run is resumed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from limner.config import differences, to_dict
from limner.errors import UserError
from limner.numerics.precision import Auto
from limner.optim.optimizers import AdamWConfig, OptimizerConfig
from limner.optim.schedules import Constant, Cosine, MultiStep, Plateau
from limner.quantization.precisions import TrainingPrecision
from limner.validation import SEEDS, InvalidSetting, Range, Validated

__all__ = ["TrainConfig", "check_resumable", "description"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Validated):
    """Settings of the training loop. Model, data and objective have separate configs.

    Attributes:
        steps: total number of updates.
        batch_size: samples per update, over all micro-batches.
        accumulate: micro-batches per update, to save memory. The gradient is that of the whole batch,
            except for two losses: the contrastive loss takes its negatives from the micro-batch, and
            `BalancedELB` balances the codes of the micro-batch.
        optimizer: optimizer (`optim/optimizers.py`) with its learning rate and decay.
        clip_norm: largest norm of the gradient; None disables clipping.
        warmup_steps: linear ramp of the learning rate, before `schedule` begins.
        cooldown_steps: linear decay of the learning rate over the last updates, on top of `schedule`: a run that must
            end early gets most of the remaining improvement.
        schedule: factor on the learning rate.
        ema_decay, ema_every: decay and interval of averaged weights, which evaluation uses; None disables averaging.
        ema_on_cpu: keep the average in CPU memory, and update it in parallel with training.
        ema_warmup: reduce the weight of the first parameters in the average (`Ema`); not in the paper.
        precision: format of weights and matrix products; by default bf16 where it is faster. The formats of
            `quantization/precisions.py` train the blocks of transformers in 8 bits, or store their matrices in 16.
        scaling: gradient scaling for backward passes in fp16 (`grad_scaler.py`): "resblocks", one scale for each
            resblock, with fp32 outside, as in the paper; "resblocks-partial", the same, but an overflow leaves out its
            block instead of skipping the update; "loss", one dynamic scale for the loss; "tensors", one constant
            scale, skipping tensors that overflow.
        checkpoint_activations: recompute each resblock's activations in the backward pass (the model needs
            `set_checkpointing`).
        checkpoint_every, keep: steps between checkpoints, and the number of checkpoints kept.
        eval_every: steps between evaluations; None evaluates at the end only.
        log_every: steps between lines of `metrics.jsonl`.
        max_bad_steps: consecutive bad updates after which the run stops with an error. An update is bad if its loss or
            gradient is not finite (it is then skipped), or if its loss is far above the first loss. Scaling "resblocks"
            may need hundreds of skipped updates to lower a scale, which falls at most once in 125 updates.
        seed: seed of all random numbers in the loop.
    """

    steps: Annotated[int, Range(1, 10**9)]
    batch_size: Annotated[int, Range(1, 2**20)] = 64
    accumulate: Annotated[int, Range(1, 2**20)] = 1
    optimizer: OptimizerConfig = field(default_factory=AdamWConfig)
    clip_norm: Annotated[float | None, Range(gt=0)] = 4.0
    warmup_steps: Annotated[int, Range(0, 10**9)] = 0
    cooldown_steps: Annotated[int, Range(0, 10**9)] = 0
    schedule: Constant | Cosine | MultiStep | Plateau = field(default_factory=Constant)
    ema_decay: Annotated[float | None, Range(0, lt=1)] = None
    ema_every: Annotated[int, Range(1, 10**6)] = 1
    ema_on_cpu: bool = False
    ema_warmup: bool = True
    precision: TrainingPrecision = field(default_factory=Auto)
    scaling: Literal["none", "resblocks", "resblocks-partial", "loss", "tensors"] = "none"
    checkpoint_activations: bool = False
    checkpoint_every: Annotated[int, Range(1, 10**9)] = 500
    keep: Annotated[int, Range(1, 10**6)] = 2
    eval_every: Annotated[int | None, Range(1, 10**9)] = None
    log_every: Annotated[int, Range(1, 10**9)] = 10
    max_bad_steps: Annotated[int, Range(1, 10**9)] = 20
    seed: Annotated[int, SEEDS] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accumulate > self.batch_size:
            raise InvalidSetting("accumulate", f"must be at most batch_size, {self.batch_size}, not {self.accumulate}")


# Settings that may differ between a checkpoint and the run that resumes from it.
MUTABLE_ON_RESUME = {
    "training.steps",
    "training.cooldown_steps",
    "training.checkpoint_every",
    "training.keep",
    "training.eval_every",
    "training.log_every",
    "training.max_bad_steps",
    "training.checkpoint_activations",
    "training.ema_on_cpu",
}


def description(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return configs and JSON values by name in the form of `config.json` and of checkpoints."""
    return json.loads(json.dumps(parts, default=to_dict))


def check_resumable(out: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise `UserError` if `now`, configs and JSON values by name, differs from the description `before` in a setting
    that a resumed run may not change. A missing setting counts as a difference."""
    changed = [path for path in differences(before, description(now)) if path not in MUTABLE_ON_RESUME]
    if changed:
        raise UserError(
            f"{out} contains a run with another {', '.join(changed[:3])}: resume with the config of that run, or train "
            "into another folder"
        )
