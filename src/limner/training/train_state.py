"""The state of a run, and its set-up."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from limner.errors import UserError
from limner.optim.ema import Ema, EmaOnCpu
from limner.training.config import TrainConfig
from limner.training.parallel import Parallel, Single, folded
from limner.training.train_module import Objective, Trainable

Evaluate = Callable[[nn.Module, int], Mapping[str, float]]

SKIPPED = "were skipped, since their loss or gradient was not finite"  # part of messages about updates
_RANGE = 10.0  # a loss is out of range above first + _RANGE * max(1, abs(first))


class Diverged(UserError):
    """Raised if training diverges."""


class Prepared(NamedTuple):
    """The result of `set_up`; `Run` describes the attributes."""

    model: nn.Module
    trainable: Trainable
    compute: nn.Module
    optimizers: list[torch.optim.Optimizer]
    ema: Ema | None


def set_up(
    model: nn.Module, objective: Objective, config: TrainConfig, device: torch.device, parallel: Parallel
) -> Prepared:
    """Set up training of a model: convert precision, prepare for the device, build optimizers, build the average.
    Each stage needs the one before.

    Raises `UserError` or `ValueError` if the model does not support the config.
    """
    model = config.precision.apply(model)
    if config.checkpoint_activations:
        if not hasattr(model, "set_checkpointing"):
            raise UserError(f"a {type(model).__name__} cannot do without checkpoint_activations=False")
        model.set_checkpointing(True)  # type: ignore[operator]
    if parallel.world > 1 and (gathered := getattr(objective, "gathered", None)):
        objective = gathered(parallel.join)
    trainable = Trainable(model, objective)
    compute = parallel.prepare(trainable, device, config.precision.dtype(device))
    optimizers = config.optimizer.build(model)
    ema = None
    if config.ema_decay is not None:
        kind = EmaOnCpu if config.ema_on_cpu else Ema
        ema = kind(model, config.ema_decay, config.ema_every, config.ema_warmup)
    return Prepared(model, trainable, compute, optimizers, ema)


class Run:
    """The state of a run.

    Attributes:
        step: number of updates done, including `skipped` ones. `bad` counts the latest consecutive updates that were
            skipped or had a loss out of range.
        config: training configuration.
        device: device of the model.
        parallel: strategy for several processes.
        model: trained model; checkpoints use its parameter names.
        trainable: model and objective as one module. `compute` is the module to call: the same, or wrapped.
        optimizers: together they hold each trainable parameter once; `parameters` lists these.
        ema: averaged parameters, or None.
        schedule: factor on the learning rate.
        generator: generator of the objective's random numbers.
        loss, norm, lr: loss and gradient norm before clipping of the last update, over all processes, and the
            learning rate of the config's optimizer.
        first: loss of the initial model; None before the first update.
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
        self.config, self.device, self.parallel = config, torch.device(device), parallel or Single()
        self.model, self.trainable, self.compute, self.optimizers, self.ema = set_up(
            model, objective, config, self.device, self.parallel
        )
        self.parameters = [p for o in self.optimizers for group in o.param_groups for p in group["params"]]
        self.schedule = config.schedule.build(config.steps)
        seed = folded(config.seed, self.parallel.rank)
        torch.manual_seed(seed)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.step = self.skipped = self.bad = 0
        self.first: float | None = None
        self.loss = self.norm = self.lr = math.nan
        self.seconds, self.started = 0.0, time.monotonic()
        self.samples, self.samples_since = 0, self.started  # samples since the last report, and its time

    @property
    def strays(self) -> bool:
        """True if the loss of the last update is far above the first loss."""
        return self.first is not None and self.loss > self.first + _RANGE * max(1.0, abs(self.first))

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
        begun = time.monotonic()
        devices = [self.device] if self.device.type == "cuda" else []
        with (
            self.ema.swapped(self.model) if self.ema else nullcontext(),
            self.parallel.gathered(),
            _eval_mode(self.model),
            torch.no_grad(),
            torch.random.fork_rng(devices),
            self.config.precision.autocast(self.device),
        ):
            found = evaluate(self.model, self.step)
        self.samples_since += time.monotonic() - begun
        return {name: float(value) for name, value in found.items()}

    def diverged(self) -> Diverged:
        """Return the error with the cause of the divergence."""
        if self.strays:
            why = f"the loss is {self.loss:.4g} and was {self.first:.4g} at first"
        elif self.bad:
            why = f"{self.bad} updates in a row had a loss or gradient that is not finite"
        else:
            why = "its weights are not finite"
        return Diverged(
            f"training diverged and stopped after step {self.step}: {why}; lower lr "
            f"({self.config.optimizer.lr:g}) or lengthen warmup_steps ({self.config.warmup_steps})"
        )


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    model.eval()
    try:
        yield
    finally:
        model.train()
