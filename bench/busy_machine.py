"""Time of `limner draw` or of a training step on a busy machine, with several settings of OpenMP.

    python bench/busy_machine.py --loops 0 2 4 6 --rounds 5
    python bench/busy_machine.py --loops 0 --rounds 20 --training

Busy loops are processes that compute without pause. The settings alternate. Prints one JSON object per number of
loops: for each setting the median over the rounds and all values, in seconds of a whole process of `limner draw`, or in
milliseconds of the median training step of a process. Other processes must not run meanwhile. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

CAPTION = "a small red circle above a large blue square on a gray background"
TRAINING = """
import statistics, time, torch
from limner.models.transformer import TransformerConfig
from limner.profiling.throughput import time_training
config = TransformerConfig(text_vocab=432, image_vocab=82, text_len=32, grid=(12, 12), width=256, depth=6, heads=4)
print(1000 * statistics.median(time_training(config, 16, torch.device("cpu")) for _ in range(4)))
"""  # the bundled scenes prior
SETTINGS = {
    "default": {},
    "libgomp's default spinning": {"GOMP_SPINCOUNT": "300000", "OMP_NUM_THREADS": str(os.cpu_count())},
    "passive waiting": {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": str(os.cpu_count())},
    "one thread": {"OMP_NUM_THREADS": "1"},
    "10,000 iterations": {"GOMP_SPINCOUNT": "10000", "OMP_NUM_THREADS": str(os.cpu_count())},
}


def measure(settings: dict[str, str], folder: str, training: bool) -> float:
    """Return the seconds of one drawing, or the milliseconds of a training step, in a new process."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    environment = {**others, **settings}
    if training:
        command = [sys.executable, "-c", "import limner\n" + TRAINING]
        return float(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)
    command = [sys.executable, "-m", "limner", "draw", CAPTION, "--output", str(Path(folder) / "drawing.png")]
    started = time.monotonic()
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return time.monotonic() - started


def main() -> None:
    """Measure every setting with every number of busy loops."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loops", type=int, nargs="+", default=[0, 2, 4, 6])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--training", action="store_true")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        measure({}, folder, arguments.training)  # files come into the page cache
        for loops in arguments.loops:
            busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
            try:
                time.sleep(1)
                taken: dict[str, list[float]] = {name: [] for name in arguments.settings}
                for _ in range(arguments.rounds):
                    for name in arguments.settings:
                        taken[name].append(round(measure(SETTINGS[name], folder, arguments.training), 2))
            finally:
                for process in busy:
                    process.kill()
                    process.wait()
            medians = {name: statistics.median(values) for name, values in taken.items()}
            print(json.dumps({"loops": loops, "median": medians, "rounds": taken}), flush=True)


if __name__ == "__main__":
    main()
