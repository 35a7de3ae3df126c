"""Parallel training of the reranker in a second process while the prior trains in this one.

    python -m limner.runs.parallel_stage DATA RUN     the second process: the contrastive model of RUN

The operations of small models are too short to share among a CPU's threads. Two processes with half of the threads each
train both models of recipe `demo` in 70% of the time in sequence (docs/log/2026-11-28.md, "Two stages in parallel").
The second one saves and stops when this one is interrupted or dies. When it is done, the prior uses all threads.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from limner.config import load_json
from limner.errors import UserError, escape_control
from limner.progress import progress
from limner.recipes.recipe import Recipe
from limner.runs.run_data import RunData
from limner.runs.stages import StageTrainer
from limner.training.checkpoint import skipped_updates
from limner.training.hooks import Hook
from limner.training.metrics_log import read_metrics
from limner.training.train_state import SKIPPED, TrainState

LOG_FILE = "contrastive.log"
_ERROR_LINE = re.compile(r"(limner|[\w.]*(Error|Exception))(: |$)")  # start of the log line that names the error


def trains_in_parallel(stages: Sequence[str], device: torch.device) -> bool:
    """Return True if a run trains the prior and the contrastive model in parallel."""
    return {"prior", "contrastive"} <= set(stages) and device.type == "cpu" and torch.get_num_threads() > 1


class WorkerHook(Hook):
    """A hook that gives the prior all `threads` when the other process is done, and raises if that process failed."""

    def __init__(self, process: subprocess.Popen[bytes], log_file: Path, threads: int) -> None:
        self.process, self.log_file, self.threads = process, log_file, threads

    def before_log(self, run: TrainState, row: dict[str, Any]) -> None:
        self.check()
        if self.process.poll() is not None:
            torch.set_num_threads(self.threads)

    def check(self) -> None:
        """Raise `UserError` with the error of the other process if that process failed."""
        if code := self.process.poll():
            lines = self.log_file.read_text("utf-8", "replace").strip().splitlines() or ["no output"]
            reason = next(filter(_ERROR_LINE.match, reversed(lines)), lines[-1])  # a warning may follow the error
            if code < 0:
                reason = f"signal {-code} killed the process, perhaps because memory ran out"
            raise UserError(f"training the contrastive model in parallel failed ({reason}): see {self.log_file}")


@contextmanager
def contrastive_in_parallel(recipe: Recipe, data: str | Path, out: Path, lock: int) -> Iterator[Hook]:
    """Train the contrastive model of the run `out` in another process, with half of the threads, during the block.

    Yields a hook for the prior's training, and waits for the other process at the end of the block. Needs the run's
    recipe and tokenizer. Raises `UserError` if the other process fails. That process also holds the run's `lock`
    (`atomic_io.exclusive_lock`), since it briefly outlives this one if this one is killed.
    """
    threads = torch.get_num_threads()
    log_file = out / LOG_FILE
    # -P: no imports from the current folder
    command = [sys.executable, "-P", "-m", "limner.runs.parallel_stage", str(data), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads // 2), "PYTHONPATH": os.pathsep.join(sys.path)}
    with log_file.open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, env=environment,
            pass_fds=() if lock < 0 else (lock,),
        )  # fmt: skip
    assert process.stdin is not None
    print(f"training the contrastive model in parallel: log in {escape_control(log_file)}", file=sys.stderr)
    hook = WorkerHook(process, log_file, threads)
    torch.set_num_threads(threads - threads // 2)
    try:
        yield hook
        if process.poll() is None:
            _wait(process, recipe.contrastive.training.steps, out / "contrastive" / "metrics.jsonl")
        hook.check()
        skipped, steps = skipped_updates(out / "contrastive")
        if skipped:
            print(f"{skipped:,} of {steps:,} updates of the contrastive model {SKIPPED}", file=sys.stderr)
    finally:
        process.stdin.close()  # makes the other process save and stop
        process.wait()
        torch.set_num_threads(threads)


def _wait(process: subprocess.Popen[bytes], steps: int, metrics: Path) -> None:
    """Show the progress of the other process until it ends."""

    def last_step() -> int:
        rows = read_metrics(metrics)
        return int(rows[-1]["step"]) if rows else 0

    with progress("training the contrastive model", steps) as bar:
        bar.resume(last_step())
        while process.poll() is None:
            bar.advance(last_step() - bar.done)
            time.sleep(1)
        bar.advance(last_step() - bar.done)


def main(data: str, out: str) -> None:
    """Train the contrastive model of the run `out`, which has a recipe and a tokenizer, until standard input closes."""

    def interrupt_when_stdin_closes() -> None:
        os.read(sys.stdin.fileno(), 1)  # unbuffered: a buffer would be locked at Python's exit
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt_when_stdin_closes, daemon=True).start()
    run_data = RunData.open(load_json(Recipe, Path(out) / "recipe.json"), data, out)
    StageTrainer(run_data, ("contrastive",)).model("contrastive")


if __name__ == "__main__":
    main(*sys.argv[1:])
