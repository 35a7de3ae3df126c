"""Time of a training step while `--profile` records, over that of a step without.

    python bench/profile_overhead.py runs/overhead --recipe scenes --windows 8
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 bench/profile_overhead.py runs/overhead-2 --recipe laptop

Trains the prior of a recipe on synthetic scenes. Windows of ten steps alternate: one is recorded, one is not. Prints a
JSON object: medians over the windows in milliseconds of a step, and the geometric mean of the windows' ratios with its
95% interval by Student's t. Writing the trace at the end of a recording is not part of a step, and is left out. Other
processes must not run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import profiler

from limner import recipes
from limner.distributed import process_group
from limner.evaluation.confidence import mean
from limner.profiling.recording import ProfileRecorder
from limner.runs.train import train_all
from limner.tasks.build_scenes import SceneDataSettings, write_scenes
from limner.training.hooks import Hook
from limner.training.train_state import TrainState

WINDOW = 10  # steps
FIRST = 2 * WINDOW  # step at which the first recording starts


class Unwritten(ProfileRecorder):
    """A recorder that writes no trace."""

    def _write(self, profile: profiler.profile) -> None:
        self._written = True


class Alternate(Hook):
    """Records every other window, and keeps the time at which each step starts."""

    def __init__(self, stacks: bool) -> None:
        self.stacks, self.starts, self.recorder = stacks, list[float](), Hook()

    def before_step(self, run: TrainState) -> None:
        if run.step >= FIRST - 1 and run.step % (2 * WINDOW) == 2 * WINDOW - 1:
            self.recorder = Unwritten(Path(), run.step + 1, run.step + 1 + WINDOW, self.stacks)
        self.recorder.before_step(run)
        self.starts.append(time.perf_counter())

    def after_update(self, run: TrainState) -> None:
        self.recorder.after_update(run)

    def windows(self) -> np.ndarray:
        """Return the median milliseconds of a step [n, 2] in each recorded window and in the one after it.

        The first step of a recording, and those next to its end, where torch collects the events, are left out.
        """
        steps = 1_000 * np.diff(self.starts)
        firsts = range(FIRST, len(steps) - 2 * WINDOW + 1, 2 * WINDOW)
        parts = [(steps[i + 1 : i + WINDOW - 1], steps[i + WINDOW + 1 : i + 2 * WINDOW - 1]) for i in firsts]
        return np.array([[statistics.median(part) for part in pair] for pair in parts])


def measure(out: Path, recipe_name: str, count: int, stacks: bool) -> dict[str, object] | None:
    """Return the times; None on all ranks but the first."""
    recipe, alternate = recipes.get(recipe_name), Alternate(stacks)
    dvae = replace(recipe.dvae, training=replace(recipe.dvae.training, steps=2))
    training = replace(recipe.prior.training, steps=FIRST + 2 * WINDOW * count + 1)
    recipe = replace(recipe, dvae=dvae, prior=replace(recipe.prior, training=training))
    with process_group.join_process_group("ddp") as parallel:
        with parallel.main_first() if parallel else nullcontext():
            if not (out / "data").exists():
                write_scenes(out / "data", SceneDataSettings(count=1_000))
        train_all(
            recipe, out / "data", out / "run", ("dvae", "prior"), parallel=parallel,
            stage_hooks=lambda stage: [alternate] if stage.name == "prior" else [],
        )  # fmt: skip
        if process_group.rank():
            return None
    windows = alternate.windows()
    ratio = mean(np.log(windows[:, 0] / windows[:, 1]), "")
    recorded, plain = np.median(windows, 0)
    return {
        "recipe": recipe_name,
        "batch_size": training.batch_size,
        "processes": parallel.world_size if parallel else 1,
        "stacks": stacks,
        "recorded_ms": round(float(recorded), 1),
        "plain_ms": round(float(plain), 1),
        "ratio": [round(float(np.exp(x)), 3) for x in (ratio.value, ratio.low, ratio.high) if x is not None],
        "windows": len(windows),
    }


def main() -> None:
    """Parse the arguments and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the data and the run, without an earlier run")
    parser.add_argument("--recipe", default="scenes")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--stacks", action="store_true", help="record Python calls, too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if result := measure(options.out, options.recipe, options.windows, options.stacks):
        print(json.dumps(result))


if __name__ == "__main__":
    main()
