"""Entry 6: the findings about stability at the size for GPUs (`limner.experiments.spikes`), as far as the time goes.

    python bench/gpu/spikes.py --minutes 9 --from FOLDER

Trials are files, and `$OUT/spikes.zip` has all of them, with the pages of the finished findings; findings share equal
trials. `--from FOLDER` continues from an earlier zip; trials of another commit's experiments run again. Trials in
progress at the end of the time are lost, so fewer workers lose less, and more workers use the GPU better.
"""

from __future__ import annotations

import signal
import tempfile
import time
import zipfile
from pathlib import Path
from types import FrameType
from typing import Any

from common import OUT, Results, parser

from limner.experiments import load, spikes

FINDINGS = ("rms-predicts", "stable-adamw", "loss-spikes")


class TimeIsUp(Exception):
    """Raised in the main thread at the end of the time."""


def main() -> None:
    """Run the trials of one finding after the other until the time is up, and pack the folder."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--findings", nargs="+", choices=FINDINGS, default=FINDINGS)
    options_parser.add_argument("--minutes", type=float, default=9)
    options_parser.add_argument("--workers", type=int, default=4, help="trials at a time")
    options = options_parser.parse_args()
    if not options.quick:
        spikes.WORKERS = options.workers
    results = Results("spikes", options)
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 60 * options.minutes)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if (earlier := options.earlier / "spikes.zip").exists():
            zipfile.ZipFile(earlier).extractall(folder)
        try:
            for name in options.findings:
                results.save(name, reproduce(name, folder, options.quick))
        except TimeIsUp:
            print("the time is up")
        signal.setitimer(signal.ITIMER_REAL, 0)
        results.save("trials", len(list((folder / "trials").glob("*.json"))))
        print(*results.values.items(), sep="\n")
        pack(folder, OUT / "spikes.zip")


def reproduce(name: str, folder: Path, quick: bool) -> dict[str, Any]:
    """Run the trials of a finding that `folder` lacks, write its page, and return its verdict."""
    start, experiment = time.perf_counter(), load(name)
    finding = experiment.reproduce(folder / "trials", quick)
    finding.save(folder, name, experiment)
    return {"holds": finding.holds, "verdict": finding.verdict, "seconds": time.perf_counter() - start}


def pack(folder: Path, path: Path) -> None:
    """Write all files of a folder to a zip file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                archive.write(file, file.relative_to(folder))


def stop(signal_number: int, frame: FrameType | None) -> None:
    """Handle the alarm at the end of the time."""
    raise TimeIsUp


if __name__ == "__main__":
    main()
