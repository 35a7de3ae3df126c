"""Time of `limner draw` or of a training step on a busy machine, with several settings of OpenMP.

    python bench/busy_machine.py --loops 0 2 4 6 --rounds 5
    python bench/busy_machine.py --loops 0 --rounds 12 --training --settings default "libgomp's default spinning"

Busy loops are processes that compute without pause. The settings alternate, in opposite order every other round. Prints
one JSON object per number of loops: for each setting the median over the rounds and all values, in seconds of a whole
process of `limner draw`, or in milliseconds of a training step: one process per setting and round, which take turns
step by step and give the median of 15. Of training it also prints the first setting's time over each other setting's,
the geometric mean over the rounds with its 95% interval. Other processes must not run meanwhile. Linux only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from limner.evaluation.confidence import t_quantile

CAPTION = "a small red circle above a large blue square on a gray background"
TURNS = 15  # training steps of a process
TRAINING = """
import sys
import limner  # before torch: it sets the threads
import torch
from limner.models.transformer import TransformerConfig
from limner.planner.throughput import time_training
config = TransformerConfig(text_vocab=432, image_vocab=82, text_len=32, grid=(12, 12), width=256, depth=6, heads=4)
for _ in sys.stdin:
    print(1000 * time_training(config, 16, torch.device("cpu")), flush=True)
"""  # the bundled scenes prior
SETTINGS = {
    "default": {},
    "libgomp's default spinning": {"GOMP_SPINCOUNT": "300000", "OMP_NUM_THREADS": str(os.cpu_count())},
    "passive waiting": {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": str(os.cpu_count())},
    "one thread": {"OMP_NUM_THREADS": "1"},
    "10,000 iterations": {"GOMP_SPINCOUNT": "10000", "OMP_NUM_THREADS": str(os.cpu_count())},
}


def environment(settings: dict[str, str]) -> dict[str, str]:
    """Return this process's environment with these settings of OpenMP and no others."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))} | settings


def time_drawings(names: list[str], folder: str) -> list[float]:
    """Return the seconds of one drawing by a new process, for each setting."""
    out = str(Path(folder) / "drawing.png")
    command = [sys.executable, "-m", "limner", "draw", CAPTION, "--engine", "torch", "--output", out]
    seconds = []
    for name in names:
        started = time.monotonic()
        subprocess.run(command, env=environment(SETTINGS[name]), check=True, capture_output=True)
        seconds.append(time.monotonic() - started)
    return seconds


def time_steps(names: list[str]) -> list[float]:
    """Return the milliseconds of a training step for each setting: medians of processes that take turns."""
    with ExitStack() as stack:
        processes = []
        for name in names:
            process = subprocess.Popen(
                [sys.executable, "-c", TRAINING],
                env=environment(SETTINGS[name]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)

        def step(process: subprocess.Popen[str]) -> float:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            return float(process.stdout.readline())

        for process in processes:
            step(process)  # warm up
        turns = [[step(process) for process in processes] for _ in range(TURNS)]
    return [statistics.median(values) for values in zip(*turns, strict=True)]


def ratio(first: list[float], other: list[float]) -> list[float]:
    """Return the geometric mean of first / other and its 95% interval (Student's t, over the rounds)."""
    logs = [math.log(a / b) for a, b in zip(first, other, strict=True)]
    mean = statistics.fmean(logs)
    half = t_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return [round(math.exp(x), 4) for x in (mean, mean - half, mean + half)]


def main() -> None:
    """Measure every setting with every number of busy loops."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loops", type=int, nargs="+", default=[0, 2, 4, 6])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--training", action="store_true")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:

        def measure(names: list[str]) -> list[float]:
            return time_steps(names) if arguments.training else time_drawings(names, folder)

        measure(["default"])  # files come into the page cache
        for loops in arguments.loops:
            busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
            try:
                time.sleep(1)
                taken: dict[str, list[float]] = {name: [] for name in arguments.settings}
                for turn in range(arguments.rounds):
                    names = arguments.settings[:: -1 if turn % 2 else 1]
                    for name, value in zip(names, measure(names), strict=True):
                        taken[name].append(round(value, 2))
            finally:
                for process in busy:
                    process.kill()
                    process.wait()
            result = {
                "loops": loops,
                "median": {name: statistics.median(values) for name, values in taken.items()},
                "rounds": taken,
            }
            if arguments.training:
                first, *others = taken
                result["ratios"] = {name: ratio(taken[first], taken[name]) for name in others}
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
