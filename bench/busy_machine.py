"""Whole-process time of `limner draw` beside busy loops, with several settings of OpenMP, in turn.

    python bench/busy_machine.py --loops 0 2 4 6 --rounds 5

Prints one JSON object per number of loops: for each setting the median of the seconds and all of them.
Other processes must not run meanwhile. Linux only, as libgomp's variables are.
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
SETTINGS = {
    "default": {},
    "libgomp's own spinning": {"GOMP_SPINCOUNT": "300000", "OMP_NUM_THREADS": str(os.cpu_count())},
    "passive waiting": {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": str(os.cpu_count())},
    "one thread": {"OMP_NUM_THREADS": "1"},
    "10,000 iterations": {"GOMP_SPINCOUNT": "10000", "OMP_NUM_THREADS": str(os.cpu_count())},
}


def seconds(settings: dict[str, str], folder: str) -> float:
    """Draw a caption once in a new process and return its wall-clock time in seconds."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    command = [sys.executable, "-m", "limner", "draw", CAPTION, "--output", str(Path(folder) / "drawing.png")]
    started = time.monotonic()
    subprocess.run(command, env={**kept, **settings}, check=True, capture_output=True)
    return time.monotonic() - started


def main() -> None:
    """Measure every setting beside every number of loops."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loops", type=int, nargs="+", default=[0, 2, 4, 6])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        seconds({}, folder)  # files come into the page cache
        for loops in arguments.loops:
            busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
            try:
                time.sleep(1)
                taken: dict[str, list[float]] = {name: [] for name in arguments.settings}
                for _ in range(arguments.rounds):
                    for name in arguments.settings:
                        taken[name].append(round(seconds(SETTINGS[name], folder), 2))
            finally:
                for process in busy:
                    process.kill()
                    process.wait()
            medians = {name: statistics.median(values) for name, values in taken.items()}
            print(json.dumps({"loops": loops, "median": medians, "seconds": taken}), flush=True)


if __name__ == "__main__":
    main()
