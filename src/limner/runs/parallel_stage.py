"""The reranker, trained in a process of its own while the prior trains here.

The operations of small models are too short to share among a CPU's threads: two processes with half of the
threads each train both models in 70 to 85% of the time that all threads take for one after the other
(docs/log/2026-11-21.md, "One thread per process").
The other process saves and stops when this one is interrupted or dies. When it is done, the prior trains with all
threads.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from limner.errors import UserError, printable
from limner.progress import progress
from limner.recipes.recipe import Recipe
from limner.training.checkpoint import skipped_updates
from limner.training.hooks import Hook
from limner.training.metrics_log import read_metrics
from limner.training.train_state import SKIPPED, Run

LOG = "contrastive.log"
_REASON = re.compile(r"(limner|[\w.]*(Error|Exception))(: |$)")  # begins the line that says why a process failed


def trained_together(stages: Sequence[str], device: torch.device) -> bool:
    """Whether a run trains the prior and the contrastive model at the same time."""
    return {"prior", "contrastive"} <= set(stages) and device.type == "cpu" and torch.get_num_threads() > 1


class _Watch(Hook):
    """Gives the prior's training all `threads` when the other process is done, and ends it when that has failed."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, threads: int) -> None:
        self.process, self.log, self.threads = process, log, threads

    def on_report(self, run: Run, row: dict[str, Any]) -> None:
        self.check()
        if self.process.poll() is not None:
            torch.set_num_threads(self.threads)

    def check(self) -> None:
        """Raises `UserError` with the last words of the other process if it has failed."""
        if code := self.process.poll():
            lines = self.log.read_text("utf-8", "replace").strip().splitlines() or ["it said nothing"]
            said = next(filter(_REASON.match, reversed(lines)), lines[-1])  # a thread may warn of something after it
            if code < 0:
                said = f"signal {-code} killed it, perhaps because memory ran out"
            raise UserError(f"training the contrastive model beside the prior failed ({said}): see {self.log}")


@contextmanager
def contrastive_beside(recipe: Recipe, data: str | Path, out: Path, lock: int) -> Iterator[Hook]:
    """Within the block another process trains the contrastive model of the run `out` with half of the threads; the
    block ends when that is done. The run's recipe and tokenizer must be written. Gives a hook for the training here.

    The other process also holds the run's `lock` (`files.locked`), since it outlives this one briefly when this one is
    killed.
    """
    threads = torch.get_num_threads()
    log = out / LOG
    command = [sys.executable, "-P", "-m", "limner.runs.worker", str(data), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads // 2)}
    with log.open("ab") as written:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=written, stderr=written, start_new_session=True,
            pass_fds=() if lock < 0 else (lock,),
            env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},  # -P: nothing from where the command is given
        )  # fmt: skip
    assert process.stdin is not None
    print(f"training the contrastive model beside it: {printable(log)}", file=sys.stderr)
    watch = _Watch(process, log, threads)
    torch.set_num_threads(threads - threads // 2)
    try:
        yield watch
        if process.poll() is None:
            _wait(process, recipe.contrastive.training.steps, out / "contrastive" / "metrics.jsonl")
        watch.check()
        skipped, steps = skipped_updates(out / "contrastive")
        if skipped:
            print(f"{skipped:,} of {steps:,} updates of the contrastive model {SKIPPED}", file=sys.stderr)
    finally:
        process.stdin.close()  # tells the other process to save and stop
        process.wait()
        torch.set_num_threads(threads)


def _wait(process: subprocess.Popen[bytes], steps: int, metrics: Path) -> None:
    """Show how far the other process is until it ends."""
    with progress("training the contrastive model", steps) as bar:
        bar.resume(_step(metrics))
        while process.poll() is None:
            bar.advance(_step(metrics) - bar.done)
            time.sleep(1)
        bar.advance(_step(metrics) - bar.done)


def _step(metrics: Path) -> int:
    rows = read_metrics(metrics)
    return int(rows[-1]["step"]) if rows else 0
