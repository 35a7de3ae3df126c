"""The one training loop: the models differ in their objective and their data, not here.

    train(model, objective, stream, config, out)

An *objective* maps (model, batch, step, generator) to a scalar loss and detached metrics; a model whose
parameters must stay within bounds has a method `constrain()`, called after each update. A
*stream* yields batches endlessly and can say and restore its position. Everything else that a run
depends on is the loop's: optimiser, averaged weights, schedule, random generators,
precision, checkpoints. All of it goes into each checkpoint, so that a run which is killed and
started again in the same folder has, on a CPU, the losses of one that was never interrupted, bit
for bit. Randomness comes from `generator`, from torch's global generator (dropout layers) and from
the stream; objectives use no other.

Everything beyond the steps is passed in: hooks (`hooks.Hook`), what the processes of a run do together
(`parallel.Parallel`) and where states are kept (`checkpoint.Checkpointer`).

Order within a step: update (`step.update`), log and evaluate, checkpoint, stop if asked to. In logs, checkpoints and
evaluations `step` is the number of updates done.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from limner.atomic_io import locked
from limner.errors import UserError
from limner.json_files import write_json
from limner.layers.low_precision import plain
from limner.progress import Progress
from limner.training.checkpoint import Checkpointer, Files
from limner.training.config import TrainConfig, description
from limner.training.grad_scaler import scaling
from limner.training.hooks import Hook
from limner.training.metrics_log import MetricsLog
from limner.training.parallel import Parallel, Single
from limner.training.signals import Signals
from limner.training.state import Stateful, restore, save
from limner.training.step import update
from limner.training.train_module import Batch, Objective
from limner.training.train_state import SKIPPED, Diverged, Evaluate, Run


class Batches(Stateful, Protocol):
    """An endless iterator over batches. Its state is its position."""

    def __next__(self) -> Batch: ...


class Interrupted(Exception):
    """Ctrl-C or SIGTERM: the current step was finished and saved; the same call continues the run."""

    def __init__(self, step: int, checkpoint: Path) -> None:
        super().__init__(f"stopped after step {step}, saved in {checkpoint}; the same command goes on from there")
        self.step, self.checkpoint = step, checkpoint


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
    stream: Batches,
    config: TrainConfig,
    out: str | Path,
    *,
    evaluate: Evaluate | None = None,
    hooks: Sequence[Hook] = (),
    record: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
    parallel: Parallel | None = None,
    checkpointer: Checkpointer | None = None,
    bar: Progress | None = None,
) -> TrainResult:
    """Train `model` in the folder `out`, going on from its newest checkpoint if there is one.

    Afterwards the model holds the averaged weights if the run averages, else its last ones, on
    `device`; layers of low precision are ordinary linear layers again.

    Args:
        evaluate: (model, step) -> metrics; called with averaged weights, in eval mode, without
            gradients, under the run's precision. Random numbers that it draws do not disturb
            training.
        hooks: called in this order; their names differ.
        record: configs and JSON values that describe the rest of the run (model, objective, data). Saved in
            `config.json`, and a checkpoint that was made with another record is refused.
        parallel: what the processes of the run do together; by default there is one.
        checkpointer: keeps states; by default as files in `out/checkpoints`, as `parallel` writes them.
        bar: advanced by one per step; says at the end how many updates were skipped.

    Raises:
        Interrupted: Ctrl-C or SIGTERM, after saving. A second signal raises `KeyboardInterrupt` at
            once.
        UserError: another process trains in the folder, its run has another config, a checkpoint cannot be
            written, or the run diverges: what is not finite or out of range is never saved.
        ValueError: two hooks have one name.
    """
    out, parallel, bar = Path(out), parallel or Single(), bar or Progress("training")
    if len({hook.name for hook in hooks}) < len(hooks):
        raise ValueError(f"the hooks {', '.join(hook.name for hook in hooks)} need names that differ")
    checkpointer = checkpointer or parallel.checkpointer(Files(out, config.keep))
    parts = {"training": config, **(record or {})}
    described = description(parts)
    with locked(out) if parallel.is_main else nullcontext(), ExitStack() as ends:
        run = Run(model, objective, config, device, parallel)
        hooks = [*scaling(run), *hooks]
        for hook in hooks:
            ends.callback(hook.close)
        parallel.divide(stream)
        saved = restore(run, stream, hooks, parts, checkpointer)
        parallel.check(run.parameters)
        if told := parallel.describe():
            bar.note(told)
        if saved:
            bar.note(f"going on from {saved}")
        bar.resume(run.step)
        if parallel.is_main:
            write_json(out / "config.json", described, indent=2)

        run.model.train()
        log = MetricsLog(out / "metrics.jsonl", run.step, writes=parallel.is_main)
        try:
            with Signals() as signals, closing(log):
                while run.step < config.steps:
                    metrics = update(run, next(stream), hooks)
                    bar.advance(1)
                    last = run.step == config.steps
                    evaluates = last or (config.eval_every and run.step % config.eval_every == 0)
                    if evaluates or run.step % config.log_every == 0:
                        row = run.report(metrics)
                        bar.advance(0, **{name: row[name] for name in list(metrics)[:4]})
                        for hook in hooks:
                            hook.on_report(run, row)
                        if evaluate and evaluates:
                            found = run.evaluate(evaluate)
                            row |= {f"eval/{name}": value for name, value in found.items()}
                            for hook in hooks:
                                hook.on_eval(run, found)
                        log.write(row)
                    if last and run.strays:
                        raise run.diverged()
                    stop = parallel.any(signals.received)
                    if last or stop or (run.step % config.checkpoint_every == 0 and not run.bad):
                        saved = save(run, stream, hooks, described, checkpointer)
                        if last or stop:
                            checkpointer.wait()
                        if stop and not last:
                            raise Interrupted(run.step, saved)
        except Diverged as error:
            saved = checkpointer.latest()
            good = f"the last good state is {saved}" if saved else "there is no checkpoint yet"
            raise UserError(f"{error}; {good}") from None
        assert saved is not None  # config.steps >= 1, so that the loop has run now or before
        plain(run.model)
        if run.ema:  # whole, where weights were in 16 bits
            run.ema.copy_to(run.model)
        if run.skipped:
            bar.note(f"{run.skipped:,} of {run.step:,} updates {SKIPPED}")
        return TrainResult(step=run.step, skipped=run.skipped, checkpoint=saved, metrics=log.last)
