"""The one training loop: the models differ in their objective and their data, not here.

    train(model, objective, stream, config, out)

An *objective* maps (model, batch, step, generator) to a scalar loss and detached metrics. One that is no mean over
samples may have a method `shared(batch)`, which adds what the micro-batches must know of the whole; a model whose
parameters must stay within bounds has a method `constrain()`, called after each update. A
*stream* yields batches endlessly and can say and restore its position. Everything else that a run
depends on is owned by the loop: optimiser, averaged weights, schedule, random generators,
precision, checkpoints. All of it goes into each checkpoint, so that a run which is killed and
started again in the same folder has, on a CPU, the losses of one that was never interrupted, bit
for bit. Randomness comes from `generator`, from torch's global generator (dropout layers) and from
the stream; objectives use no other.

Order within a step: update, average, log and evaluate, checkpoint, stop if asked to. `step` counts
from 0 in what the loop passes to objectives and schedules; in logs, checkpoints and evaluations it
is the number of updates done.
"""

import json
import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Protocol, Self

import torch
from torch import Tensor, nn

from limner.config import differences, to_dict
from limner.errors import UserError
from limner.files import atomic_write_text, locked
from limner.numerics.precision import Precision, autocast, choose_precision
from limner.optim.ema import Ema
from limner.optim.optimizers import AdamW, Muon
from limner.optim.schedules import Constant, Cosine, Plateau, warmup
from limner.progress import Progress
from limner.ranges import SEEDS, Checked, OutOfRange, Range
from limner.training import checkpoint as checkpoints
from limner.training.metrics_log import MetricsLog

Batch = Mapping[str, Tensor]
Evaluate = Callable[[nn.Module, int], Mapping[str, float]]


class Objective(Protocol):
    """A scalar loss (mean over the batch) and detached scalars to log."""

    def __call__(
        self, model: Any, batch: Any, step: int, generator: torch.Generator, /
    ) -> tuple[Tensor, Mapping[str, Tensor]]: ...


class Stateful(Protocol):
    """Whatever has a position or memory: its state is JSON values."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any) -> None: ...


class Stream(Stateful, Protocol):
    """An endless iterator over batches whose state is its position."""

    def __next__(self) -> Batch: ...


class Callback:
    """Hooks; override what is needed. Metrics are numbers by name."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """After each logged step."""

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """After each evaluation."""


class Interrupted(Exception):
    """Ctrl-C or SIGTERM: the step under way was finished and saved; the same call goes on."""

    def __init__(self, step: int, checkpoint: Path) -> None:
        super().__init__(f"stopped after step {step}, saved in {checkpoint}; the same command goes on from there")
        self.step, self.checkpoint = step, checkpoint


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Checked):
    """How to train; what to train is the model's, the data's and the objective's config.

    Attributes:
        steps: updates in all.
        batch_size: samples an update, over all micro-batches.
        accumulate: micro-batches an update is computed in, to save memory. The gradient is that of
            the whole batch but for two losses that look at a batch as a whole: the contrastive loss,
            whose negatives are those of a micro-batch, and the balance of codes in `BalancedELB`.
        optimizer: AdamW or Muon, with its step size and decay.
        clip_norm: longest gradient; None clips nothing.
        warmup_steps: linear ramp of the step size, on top of `schedule`.
        schedule: factor on the step size.
        ema_decay, ema_every: averaged weights, which evaluation then uses; None keeps none.
        ema_warmup: let the first averagings forget faster (`Ema`); the paper names no such thing.
        precision: of matrix products; "auto" takes bf16 where the hardware has it.
        checkpoint_activations: recompute activations in the backward pass (models offer
            `set_checkpointing`).
        checkpoint_every, keep: steps between checkpoints, and how many stay.
        eval_every: steps between evaluations; None evaluates at the end only.
        log_every: steps between lines of `metrics.jsonl`.
        max_bad_steps: updates in a row that are skipped, since their loss or gradient is not finite, or
            whose loss is far above that of the first, before the run gives up.
        seed: of all randomness in the loop.
    """

    steps: Annotated[int, Range(1, 10**9)]
    batch_size: Annotated[int, Range(1, 2**20)] = 64
    accumulate: Annotated[int, Range(1, 2**20)] = 1
    optimizer: AdamW | Muon = field(default_factory=AdamW)
    clip_norm: Annotated[float | None, Range(above=0)] = 4.0
    warmup_steps: Annotated[int, Range(0, 10**9)] = 0
    schedule: Constant | Cosine | Plateau = field(default_factory=Constant)
    ema_decay: Annotated[float | None, Range(0, below=1)] = None
    ema_every: Annotated[int, Range(1, 10**6)] = 1
    ema_warmup: bool = True
    precision: Precision = "auto"
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
            raise OutOfRange("accumulate", f"must be at most batch_size, {self.batch_size}, not {self.accumulate}")


_RANGE = 10.0  # a loss that is this much (or this many times) above the first has left its range

# What may differ between the run that wrote a checkpoint and the one that goes on from it.
FREE_TO_CHANGE = {
    "training.steps",
    "training.checkpoint_every",
    "training.keep",
    "training.eval_every",
    "training.log_every",
    "training.max_bad_steps",
    "training.checkpoint_activations",
}


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a finished run leaves.

    Attributes:
        step: updates done, of which `skipped` changed nothing (their gradient was not finite).
        checkpoint: the last one.
        metrics: the last line of `metrics.jsonl`.
    """

    step: int
    skipped: int
    checkpoint: Path
    metrics: Mapping[str, float]


def train(
    model: nn.Module,
    objective: Objective,
    stream: Stream,
    config: TrainConfig,
    out: str | Path,
    *,
    evaluate: Evaluate | None = None,
    callbacks: Sequence[Callback] = (),
    record: Mapping[str, Any] | None = None,
    state: Mapping[str, Stateful] | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> TrainResult:
    """Train `model` in the folder `out`, going on from its newest checkpoint if there is one.

    Afterwards the model holds the averaged weights if the run averages, else its last ones, on
    `device`.

    Args:
        evaluate: (model, step) -> metrics; called with averaged weights, in eval mode, without
            gradients, under the run's precision. Random numbers that it draws do not disturb
            training.
        record: JSON values that describe the rest of the run (model, data, recipe). Saved in
            `config.json`, and a checkpoint that was made with another record is refused.
        state: further things whose state belongs into the checkpoint, by name.
        progress: advanced by one a step.

    Raises:
        Interrupted: Ctrl-C or SIGTERM, after saving. A second signal raises `KeyboardInterrupt` at
            once.
        UserError: another process trains in the folder, its run has another config, a checkpoint cannot be
            written, or the run diverges: what is not finite or out of range is never saved.
    """
    out, progress = Path(out), progress or Progress("training")
    with locked(out):
        run = _Run(model, objective, stream, config, out, record or {}, state or {}, torch.device(device))
        saved = run.restore()
        if saved:
            progress.note(f"going on from {saved}")
        progress.resume(run.step)
        atomic_write_text(out / "config.json", json.dumps(run.description, indent=2) + "\n")

        model.train()
        with _Signals() as signals, closing(MetricsLog(out / "metrics.jsonl", run.step)) as log:
            while run.step < config.steps:
                metrics = run.update(next(stream))
                progress.advance(1)
                last = run.step == config.steps
                evaluates = last or (config.eval_every and run.step % config.eval_every == 0)
                if evaluates or run.step % config.log_every == 0:
                    row = run.report(metrics)
                    progress.advance(0, **{name: row[name] for name in list(metrics)[:4]})
                    for callback in callbacks:
                        callback.on_step(run.step, row)
                    if evaluate and evaluates:
                        found = run.evaluate(evaluate)
                        row |= {f"eval/{name}": value for name, value in found.items()}
                        for callback in callbacks:
                            callback.on_eval(run.step, found)
                    log.write(row)
                if last and run.strays:
                    raise UserError(run.hopeless())
                if last or signals.received or (run.step % config.checkpoint_every == 0 and not run.bad):
                    saved = run.save()
                    if signals.received and not last:
                        raise Interrupted(run.step, saved)
        assert saved is not None  # config.steps >= 1, so that the loop has run now or before
        if run.ema:
            run.ema.copy_to(model)
        return TrainResult(step=run.step, skipped=run.skipped, checkpoint=saved, metrics=log.last)


def prepare(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Make the model ready for training; the optimisers of its parameters. Raises `UserError` or `ValueError` if it
    cannot be trained so."""
    if config.checkpoint_activations:
        if not hasattr(model, "set_checkpointing"):
            raise UserError(f"a {type(model).__name__} cannot do without checkpoint_activations=False")
        model.set_checkpointing(True)  # type: ignore[operator]
    return config.optimizer.build(model)


def refuse_changes(out: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises `UserError` if a run's description differs in more than what a run that goes on may change."""
    if changed := [path for path in differences(before, now) if path not in FREE_TO_CHANGE]:
        raise UserError(
            f"{out} holds a run with another {', '.join(changed[:3])}; go on with the "
            "config that it was started with, or train into another folder"
        )


class _Run:
    """All that changes while a run goes on, and how it is saved."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        stream: Stream,
        config: TrainConfig,
        out: Path,
        record: Mapping[str, Any],
        state: Mapping[str, Stateful],
        device: torch.device,
    ) -> None:
        self.model, self.device = model.to(device), device
        self.objective, self.config, self.out = objective, config, out
        self.description = json.loads(json.dumps({"training": to_dict(config), **record}))
        self.dtype = choose_precision(device, config.precision)
        self.optimizers = prepare(model, config)
        self.parameters = [p for o in self.optimizers for group in o.param_groups for p in group["params"]]
        self.schedule = config.schedule.build(config.steps)
        self.ema = None
        if config.ema_decay is not None:
            self.ema = Ema(model, config.ema_decay, config.ema_every, config.ema_warmup)
        torch.manual_seed(config.seed)
        self.generator = torch.Generator(device).manual_seed(config.seed)
        self.parts: dict[str, Stateful] = {"stream": stream, "schedule": self.schedule, **state}
        self.step = self.skipped = self.bad = 0  # bad: skipped or out of range, in a row
        self.first: float | None = None  # loss of the model that the run began with
        self.loss = math.nan  # of the last update
        self.seconds, self.started = 0.0, time.monotonic()  # of earlier processes; of this one
        self.lr = self.norm = math.nan  # of the last update
        self.seen, self.seen_since = 0, self.started  # samples since the last report

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """One optimiser step; the metrics of its batch, "loss" first."""
        factor = warmup(self.step, self.config.warmup_steps) * self.schedule.factor(self.step)
        self.lr = self.config.optimizer.lr * factor
        rows = len(next(iter(batch.values())))
        if self.config.accumulate > 1 and (shared := getattr(self.objective, "shared", None)):
            batch = {**batch, **shared(batch)}
        metrics: dict[str, Tensor] = {}
        for part in _split(batch, rows, self.config.accumulate):
            part = {name: _to(tensor, self.device) for name, tensor in part.items()}
            weight = len(next(iter(part.values()))) / rows
            with autocast(self.device, self.dtype):
                loss, found = self.objective(self.model, part, self.step, self.generator)
            (loss * weight).backward()
            for name, value in {"loss": loss, **found}.items():
                metrics[name] = metrics.get(name, 0.0) + value.detach().float() * weight
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        # The only wait for the device in a step.
        self.loss, self.norm = torch.stack([metrics["loss"], norm]).tolist()
        finite = math.isfinite(self.loss) and math.isfinite(self.norm)
        if finite:
            if self.config.clip_norm is not None:
                nn.utils.clip_grads_with_norm_(self.parameters, self.config.clip_norm, norm)
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["initial_lr"] * factor
                optimizer.step()
            if constrain := getattr(self.model, "constrain", None):
                constrain()
            self.schedule.observe(self.loss)
            if self.ema:
                self.ema.update(self.model, self.step + 1)
            self.first = self.loss if self.first is None else self.first
        self.skipped += not finite
        self.bad = self.bad + 1 if self.strays or not finite else 0
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.step, self.seen = self.step + 1, self.seen + rows
        if self.bad >= self.config.max_bad_steps:
            raise UserError(self.hopeless())
        return metrics

    @property
    def strays(self) -> bool:
        """Whether the last update's loss is far above that of the model that the run began with."""
        return self.first is not None and self.loss > self.first + _RANGE * max(1.0, abs(self.first))

    def report(self, metrics: Mapping[str, Tensor]) -> dict[str, Any]:
        """The line for the log."""
        now = time.monotonic()
        values = torch.stack([v.to(self.device) for v in metrics.values()]).tolist()
        row = {
            "step": self.step,
            **dict(zip(metrics, values, strict=True)),
            "lr": self.lr,
            "grad_norm": self.norm,
            "skipped": self.skipped,
            "samples_per_s": round(self.seen / max(now - self.seen_since, 1e-9), 2),
            "seconds": round(self.seconds + now - self.started, 2),
        }
        self.seen, self.seen_since = 0, now
        return row

    def evaluate(self, evaluate: Evaluate) -> dict[str, float]:
        """Metrics of the averaged weights; model and generators are as before afterwards."""
        begun = time.monotonic()
        devices = [self.device] if self.device.type == "cuda" else []
        with (
            self.ema.swapped(self.model) if self.ema else nullcontext(),
            _eval_mode(self.model),
            torch.no_grad(),
            torch.random.fork_rng(devices),
            autocast(self.device, self.dtype),
        ):
            found = evaluate(self.model, self.step)
        self.seen_since += time.monotonic() - begun
        return {name: float(value) for name, value in found.items()}

    def save(self) -> Path:
        """Write a checkpoint of everything here. Raises `UserError` if any of it is not finite."""
        tensors = {
            "model": checkpoints.model_tensors(self.model),
            "optimizer": checkpoints.optimizer_tensors(self.model, self.optimizers),
            "rng": {"torch": torch.get_rng_state(), "objective": self.generator.get_state()},
        }
        if self.ema:
            tensors["ema"] = self.ema.state_dict()
        if self.device.type == "cuda":
            tensors["rng"]["cuda"] = torch.cuda.get_rng_state(self.device)
        for group in tensors.values():
            if not all(t.isfinite().all() for t in group.values() if t.is_floating_point()):
                raise UserError(self.hopeless())
        state = {
            "step": self.step,
            "first": self.first,
            "skipped": self.skipped,
            "bad": self.bad,
            "seconds": self.seconds + time.monotonic() - self.started,
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
            "config": self.description,
            "made_with": self._made_with(),
        }
        return checkpoints.save(self.out, self.step, tensors, state, self.config.keep)

    def restore(self) -> Path | None:
        """Go on from the newest checkpoint in the folder, which is returned; None without one."""
        checkpoints.clear(self.out)
        found = checkpoints.latest(self.out)
        if found is None:
            return None
        state = checkpoints.read_state(found)
        try:
            self._check(state, found)
            self._load(state, found)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"{found} is no checkpoint of such a run: {error!r}") from error
        return found

    def _check(self, state: Mapping[str, Any], found: Path) -> None:
        refuse_changes(self.out, state["config"], self.description)
        if state["made_with"] != self._made_with():
            made_with = ", ".join(state["made_with"].values())
            warnings.warn(f"{found} was made with {made_with}: results may differ", stacklevel=4)

    def _load(self, state: Mapping[str, Any], found: Path) -> None:
        where = str(found)
        tensors = {name: checkpoints.read_tensors(found, name) for name in ("model", "optimizer")}
        checkpoints.load_model(self.model, tensors["model"], where)
        checkpoints.load_optimizers(self.model, self.optimizers, tensors["optimizer"], where)
        if self.ema:
            self.ema.load_state_dict(checkpoints.read_tensors(found, "ema"))
        for name, part in self.parts.items():
            part.load_state_dict(state["parts"][name])
        rng = checkpoints.read_tensors(found, "rng")
        torch.set_rng_state(rng["torch"])
        if state["made_with"]["device"] == self.device.type:  # else they are of another kind
            self.generator.set_state(rng["objective"])
            if self.device.type == "cuda":
                torch.cuda.set_rng_state(rng["cuda"], self.device)
        self.step, self.skipped, self.bad = state["step"], state["skipped"], state["bad"]
        self.first, self.seconds = state["first"], state["seconds"]

    def _made_with(self) -> dict[str, str]:
        """What may change the last bits of a result without being a setting."""
        try:
            limner = version("limner")
        except PackageNotFoundError:  # run from a source tree
            limner = "unreleased"
        precision = str(self.dtype).removeprefix("torch.")
        return {
            "limner": f"limner {limner}",
            "torch": f"torch {torch.__version__}",
            "device": self.device.type,
            "precision": precision,
        }

    def hopeless(self) -> str:
        """Why the run gives up, and from where to go on."""
        if self.strays:
            why = f"the loss is {self.loss:.4g} and was {self.first:.4g} at first"
        elif self.bad:
            why = f"{self.bad} updates in a row had a loss or gradient that is not finite"
        else:
            why = "its weights are not finite"
        saved = checkpoints.latest(self.out)
        return (
            f"training diverged and stopped after step {self.step}: {why}; lower lr "
            f"({self.config.optimizer.lr:g}) or lengthen warmup_steps ({self.config.warmup_steps}); "
            + (f"the last good state is {saved}" if saved else "there is no checkpoint yet")
        )


class _Signals:
    """Turns a SIGINT or SIGTERM into a request to stop after the step; a second one stops now."""

    received = False

    def __enter__(self) -> Self:
        self._previous = {}
        if threading.current_thread() is threading.main_thread():
            self._previous = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            raise KeyboardInterrupt
        self.received = True
        # `print` is not safe within a signal handler.
        os.write(2, b"\nfinishing this step, then saving; once more to stop at once\n")

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    model.eval()
    try:
        yield
    finally:
        model.train()


def _split(batch: Batch, rows: int, parts: int) -> Iterator[Batch]:
    """`parts` micro-batches of sizes that differ by one at most."""
    edges = [rows * i // parts for i in range(parts + 1)]
    for start, end in pairwise(edges):
        if end > start:
            yield {name: tensor[start:end] for name, tensor in batch.items()}


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device; from pinned memory and without waiting where that exists."""
    pinned = device.type == "cuda" and tensor.device.type == "cpu"
    return tensor.pin_memory().to(device, non_blocking=True) if pinned else tensor.to(device)
