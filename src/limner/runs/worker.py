"""The process that trains the contrastive model in `parallel_stage.py`: `python -m limner.runs.worker DATA RUN`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from limner.config import load_json
from limner.recipes.recipe import Recipe
from limner.runs.run_data import RunData
from limner.runs.stages import StageTrainer


def main(data: str, out: str) -> None:
    """Train the contrastive model of the run `out`, and stop early if standard input closes. Needs the run's recipe
    and tokenizer."""

    def interrupt_when_stdin_closes() -> None:
        os.read(sys.stdin.fileno(), 1)  # unbuffered: a buffer would be locked at Python's exit
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt_when_stdin_closes, daemon=True).start()
    run_data = RunData.open(load_json(Recipe, Path(out) / "recipe.json"), data, out)
    StageTrainer(run_data, ("contrastive",)).model("contrastive")


if __name__ == "__main__":
    main(*sys.argv[1:])
