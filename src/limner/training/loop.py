"""The training loop of all models, which differ only in objective and data.

    train(TrainState(model, objective, config), stream, out)

An *objective* maps (model, batch, step, generator) to a scalar loss and detached metrics. A model with bounded
parameters has a method `constrain()`, called after each update. A *stream* yields batches endlessly, and saves and
restores its position. `TrainState` owns all other state: optimizer, averaged weights, schedule, random generators. Each
checkpoint holds all of it: on a CPU, a run that is killed and restarted in the same folder has the same losses, bit for
bit, as an uninterrupted run. Randomness comes only from `generator`, torch's global generator (dropout layers) and the
stream.

Order within a step: update (`step.update`), log and evaluate, checkpoint, stop on request. In logs, checkpoints and
evaluations `step` is the number of updates done.
"""

import math
import os
import signal
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from limner.atomic_io import exclusive_lock
from limner.errors import UserError
from limner.json_files import write_json
from limner.progress import Progress
from limner.quantization.low_precision import to_linear
from limner.spans import span
from limner.training.checkpoint import Checkpointer
from limner.training.config import description
from limner.training.grad_scaler import scaling
from limner.training.hooks import Hook
from limner.training.metrics_log import MetricsLog
from limner.training.state import Batches, restore, save
from limner.training.step import update
from limner.training.train_state import SKIPPED, Diverged, Evaluate, TrainState

__all__ = ["Batches", "Interrupted", "TrainResult", "stop_signals", "train"]


class Interrupted(Exception):
    """Raised on Ctrl-C or SIGTERM after finishing and saving the current step; the same call resumes the run."""

    def __init__(self, step: int, checkpoint: Path) -> None:
        super().__init__(f"stopped after step {step}, saved in {checkpoint}; the same command resumes it")
        self.step, self.checkpoint = step, checkpoint


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The result of a finished run: the number of updates, how many of them were skipped because loss or gradient was
    not finite, the path of the last checkpoint, and the last line of `metrics.jsonl`."""

    step: int
    skipped: int
    checkpoint: Path
    metrics: Mapping[str, float]


def train(
    run: TrainState,
    stream: Batches,
    out: str | Path,
    *,
    evaluate: Evaluate | None = None,
    hooks: Sequence[Hook] = (),
    record: Mapping[str, Any] | None = None,
    checkpointer: Checkpointer | None = None,
    bar: Progress | None = None,
) -> TrainResult:
    """Train in the folder `out`, resuming from its newest checkpoint if it has one.

    Afterwards `run.model` has the averaged weights if the run averages, else the last ones. Low-precision layers are
    converted back to ordinary linear layers.

    Args:
        run: a new state.
        evaluate: (model, step) -> metrics; called with averaged weights, in eval mode, without gradients, under the
            run's precision. Drawing random numbers in it does not affect training.
        hooks: called in this order (`hooks.Hook`); their names must differ.
        record: configs and JSON values that describe the rest of the run (model, objective, data). Saved in
            `config.json`; resuming with another record raises `UserError`.
        checkpointer: store of states; by default files in `out/checkpoints`, as the run's strategy writes them.
        bar: advanced by one per step; shows the number of skipped updates at the end.

    Raises:
        Interrupted: Ctrl-C or SIGTERM, after saving. A second signal raises `KeyboardInterrupt` immediately.
        UserError: another process trains in the folder, its run has another config, a checkpoint cannot be
            written, or the run diverges. Values that are not finite are never saved.
        ValueError: two hooks have the same name.
    """
    if len({hook.name for hook in hooks}) < len(hooks):
        raise ValueError(f"two of the hooks {', '.join(hook.name for hook in hooks)} have one name: rename one")
    out, bar, is_main = Path(out), bar or Progress("training"), run.parallel.is_main
    checkpointer = checkpointer or run.parallel.checkpointer(Checkpointer(out, run.config.keep))
    with exclusive_lock(out) if is_main else nullcontext(), ExitStack() as stack:
        hooks = [*scaling(run), *hooks]
        for hook in hooks:
            stack.callback(hook.close)
        described = description({"training": run.config, **(record or {})})
        loop = _Loop(run, stream, evaluate, hooks, described, checkpointer, bar)
        loop.resume()
        if is_main:
            write_json(out / "config.json", described, indent=2)
        log = stack.enter_context(closing(MetricsLog(out / "metrics.jsonl", run.step, writes=is_main)))
        try:
            loop.finish_steps(log, stack.enter_context(stop_signals()))
        except Diverged as error:
            saved = checkpointer.latest()
            state = f"the last good checkpoint is {saved}" if saved else "there is no checkpoint yet"
            raise UserError(f"{error}; {state}") from None
    to_linear(run.model)
    if run.ema:  # in fp32, also if weights were in 16 bits
        run.ema.copy_to(run.model)
    if run.skipped:
        bar.note(f"{run.skipped:,} of {run.step:,} updates {SKIPPED}")
    assert loop.saved is not None  # config.steps >= 1: the loop has run now or before
    return TrainResult(step=run.step, skipped=run.skipped, checkpoint=loop.saved, metrics=log.last)


@dataclass
class _Loop:
    """The steps of a run, and what is due after a step. `description` has all configs by name, as JSON values."""

    run: TrainState
    stream: Batches
    evaluate: Evaluate | None
    hooks: Sequence[Hook]
    description: Mapping[str, Any]
    checkpointer: Checkpointer
    bar: Progress
    saved: Path | None = None

    @property
    def ended(self) -> bool:
        """True after the last step."""
        return self.run.step >= self.run.config.steps or any(hook.done for hook in self.hooks)

    def resume(self) -> None:
        """Restore the newest state."""
        run = self.run
        run.parallel.shard_stream(self.stream)
        self.saved = restore(run, self.stream, self.hooks, self.description, self.checkpointer)
        run.parallel.assert_replicas_equal(run.parameters)
        for hook in self.hooks:
            hook.before_training(run)
        if summary := run.parallel.reduction.summary():
            self.bar.note(summary)
        if self.saved:
            self.bar.note(f"resuming from {self.saved}")
        self.bar.resume(run.step)
        run.model.train()

    def finish_steps(self, log: MetricsLog, signals: Collection[int]) -> None:
        """Run the remaining steps. After a step log, evaluate and save if that is due."""
        run, config = self.run, self.run.config
        while not self.ended:
            with span("input"):
                batch = next(self.stream)
            metrics = update(run, batch, self.hooks)
            self.bar.advance(1)
            evaluates = run.step == config.steps or bool(config.eval_every and run.step % config.eval_every == 0)
            if evaluates or run.step % config.log_every == 0:
                log.write(self._row(metrics, evaluates))
            last = self.ended
            if last and (run.loss_exploded or not math.isfinite(run.loss)):
                raise run.diverged()
            stop = run.parallel.any(bool(signals))
            if last or stop or (run.step % config.checkpoint_every == 0 and not run.consecutive_bad_steps):
                self.saved = saved = save(run, self.stream, self.hooks, self.description, self.checkpointer)
                if last or stop:
                    self.checkpointer.flush()
                if stop and not last:
                    raise Interrupted(run.step, saved)

    def _row(self, metrics: Mapping[str, Tensor], evaluates: bool) -> dict[str, Any]:
        """Return the row for the log from the metrics of an update."""
        row = self.run.report(metrics)
        self.bar.advance(0, **{name: row[name] for name in list(metrics)[:4]})
        for hook in self.hooks:
            hook.before_log(self.run, row)
        if self.evaluate and evaluates:
            evaluation = self.run.evaluate(self.evaluate)
            row |= {f"eval/{name}": value for name, value in evaluation.items()}
            for hook in self.hooks:
                hook.after_eval(self.run, evaluation)
        return row


@contextmanager
def stop_signals() -> Iterator[Collection[int]]:
    """Yield the signals received within the block, SIGINT or SIGTERM. A second of one kind raises `KeyboardInterrupt`.

    On Ctrl-C the terminal sends SIGINT to all processes that `torchrun` has started, and `torchrun` sends them SIGTERM.
    `torchrun` kills processes that still run after 30 s, or after its --shutdown-timeout (torch 2.12).
    """
    received: list[int] = []

    def handle(number: int, frame: object) -> None:
        if number in received:
            raise KeyboardInterrupt
        received.append(number)
        if len(received) == 1:  # `print` is unsafe within a signal handler
            os.write(2, b"\nfinishing and saving this step; press Ctrl-C again to stop now\n")

    in_main_thread = threading.current_thread() is threading.main_thread()
    previous = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM) if in_main_thread}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
