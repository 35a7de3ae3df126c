"""The state of a run, and its set-up."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from limner.errors import UserError
from limner.numerics.seeding import fold_in
from limner.optim.ema import Ema, EmaOnCpu
from limner.training.config import TrainConfig
from limner.training.parallel import Parallel, SingleProcess
from limner.training.train_module import Objective, Trainable

__all__ = ["Diverged", "TrainState", "prepare_model"]

Evaluate = Callable[[nn.Module, int], Mapping[str, float]]

SKIPPED = "were skipped, since their loss or gradient was not finite"  # part of messages about updates
LOSS_RANGE = 10.0  # a loss is out of range above initial_loss + LOSS_RANGE * max(1, abs(initial_loss))


class Diverged(UserError):
    """Raised if training diverges."""


def prepare_model(
    model: nn.Module, objective: Objective, config: TrainConfig, device: torch.device, parallel: Parallel
) -> tuple[nn.Module, Trainable, nn.Module, list[torch.optim.Optimizer], Ema | None]:
    """Set up training of a model: convert precision, prepare for the device, build optimizers, build the average.
    Each stage needs the one before. `TrainState` describes the results.

    Raises `UserError` or `ValueError` if the model does not support the config.
    """
    model = config.precision.apply(model)
    if config.checkpoint_activations:
        if not hasattr(model, "set_checkpointing"):
            raise UserError(f"a {type(model).__name__} cannot recompute activations: set checkpoint_activations=False")
        model.set_checkpointing(True)  # type: ignore[operator]
    trainable = Trainable(model, objective)
    if parallel.world_size > 1 and (gathered := getattr(objective, "gathered", None)):
        trainable.objective = gathered(parallel.all_gather_with_grad)
    wrapped = parallel.prepare(trainable, device, config.precision.dtype(device))
    return model, trainable, wrapped, *_build_updaters(model, config)


def _build_updaters(model: nn.Module, config: TrainConfig) -> tuple[list[torch.optim.Optimizer], Ema | None]:
    optimizers = config.optimizer.build(model)
    ema = None
    if config.ema_decay is not None:
        ema = (EmaOnCpu if config.ema_on_cpu else Ema)(model, config.ema_decay, config.ema_every, config.ema_warmup)
    return optimizers, ema


def _trained(optimizers: Sequence[torch.optim.Optimizer]) -> list[nn.Parameter]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


class TrainState:
    """The state of a run.

    Attributes:
        step: number of updates done, including `skipped` ones. `consecutive_bad_steps` counts the latest updates that
            were skipped or had a loss out of range.
        config: training configuration.
        device: device of the model.
        parallel: strategy for several processes.
        model: trained model; checkpoints use its parameter names.
        trainable: model and objective as one module. `wrapped` is the module to call: the same, or in a wrapper.
        optimizers: together they hold each trainable parameter once; `parameters` lists these.
        ema: averaged parameters, or None.
        schedule: factor on the learning rate.
        generator: generator of the objective's random numbers.
        loss, norm, lr: loss and gradient norm before clipping of the last update, over all processes, and the
            learning rate of the config's optimizer.
        initial_loss: loss of the initial model; None before the first update.
        seconds: training time before the last resume.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        config: TrainConfig,
        device: torch.device | str = "cpu",
        parallel: Parallel | None = None,
    ) -> None:
        self.config, self.device, self.parallel = config, torch.device(device), parallel or SingleProcess()
        self.model, self.trainable, self.wrapped, self.optimizers, self.ema = prepare_model(
            model, objective, config, self.device, self.parallel
        )
        self.parameters = _trained(self.optimizers)
        self.schedule = config.schedule.build(max(1, config.steps - config.warmup_steps))
        seed = fold_in(config.seed, self.parallel.rank)
        torch.manual_seed(seed)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.step = self.skipped = self.consecutive_bad_steps = 0
        self.initial_loss: float | None = None
        self.loss = self.norm = self.lr = math.nan
        self.seconds, self.started = 0.0, time.monotonic()
        self.samples, self.samples_since = 0, self.started  # samples since the last report, and its time

    def rebuild_updaters(self) -> None:
        """Build new optimizers and a new average, without earlier states, after the strategy has replaced parameters of
        the model."""
        self.optimizers, self.ema = _build_updaters(self.model, self.config)
        self.parameters = _trained(self.optimizers)

    @property
    def loss_exploded(self) -> bool:
        """True if the loss of the last update is far above the first loss."""
        return (first := self.initial_loss) is not None and self.loss > first + LOSS_RANGE * max(1.0, abs(first))

    def report(self, metrics: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the row for the log from the metrics of an update."""
        now = time.monotonic()
        values = self.parallel.mean(torch.stack([v.to(self.device) for v in metrics.values()])).tolist()
        row = {
            "step": self.step,
            **dict(zip(metrics, values, strict=True)),
            "lr": self.lr,
            "grad_norm": self.norm,
            "skipped": self.skipped,
            "samples_per_s": round(self.samples / max(now - self.samples_since, 1e-9), 2),
            "seconds": round(self.seconds + now - self.started, 2),
        }
        self.samples, self.samples_since = 0, now
        return row

    def evaluate(self, evaluate: Evaluate) -> dict[str, float]:
        """Return the metrics of the averaged weights; the state of model and generators is restored."""
        start = time.monotonic()
        devices = [self.device] if self.device.type == "cuda" else []
        self.model.eval()
        try:
            with (
                self.ema.swapped(self.model) if self.ema else nullcontext(),
                self.parallel.unsharded(),
                torch.no_grad(),
                torch.random.fork_rng(devices),
                self.config.precision.autocast(self.device),
            ):
                metrics = evaluate(self.model, self.step)
        finally:
            self.model.train()
        self.samples_since += time.monotonic() - start
        return {name: float(value) for name, value in metrics.items()}

    def diverged(self) -> Diverged:
        """Return the error with the cause of the divergence."""
        if self.loss_exploded:
            reason = f"the loss is {self.loss:.4g} and was {self.initial_loss:.4g} at first"
        elif self.consecutive_bad_steps:
            reason = f"{self.consecutive_bad_steps} updates in a row had a loss or gradient that is not finite"
        else:
            reason = "its weights are not finite"
        return Diverged(
            f"training diverged and stopped after step {self.step}: {reason}; lower lr "
            f"({self.config.optimizer.lr:g}) or lengthen warmup_steps ({self.config.warmup_steps})"
        )
