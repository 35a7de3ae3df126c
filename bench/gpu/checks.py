"""Entry 5: tests and commands that need a GPU. A check that fails does not end the others.

    python bench/gpu/checks.py

    train, draw         a tiny recipe in all stages, and a picture by it
    resume              the prior from a checkpoint of that run: losses as before
    zero2, ddp, fsdp    the same recipe in one process of torchrun, with NCCL
    checkpoints         time of writing a sharded checkpoint
    tests               `pytest -m gpu`
    compiled drawing    `limner bench --compiled`

The results have, for each check, its seconds and the end of its output, or its error. `--quick` leaves out `ddp`,
`fsdp`, `checkpoints` and compiled drawing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Results, parser

from limner.training.metrics_log import read_metrics

ROOT = Path(__file__).parents[2]
PYTHON, LIMNER = (sys.executable,), (sys.executable, "-m", "limner")
TORCHRUN = (*PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "1")
RECIPE = (
    "--recipe scenes --dvae PatchStage --dvae.model.size 48 --dvae.model.vocab 64 --dvae.model.width 8 "
    "--contrastive.objective.cut-paste-negatives 0 --contrastive.model.width 32 --contrastive.model.depth 1 "
    "--prior.model.width 32 --prior.model.heads 2 --prior.model.depth 2 --prior.training.batch-size 8 "
    "--prior.training.checkpoint-every 4 --prior.training.steps 8 --prior.training.log-every 1 "
    "--contrastive.training.batch-size 16 --contrastive.training.steps 4 --dvae.training.steps 4"
)
QUICK = ("train", "draw", "resume", "zero2", "tests")
LIMIT = 300  # seconds of a command
TOLERANCE = 0.02  # relative difference of losses that sums in another order may explain in bf16


def main() -> None:
    """Run all checks in a temporary folder, and print which failed."""
    options = parser(__doc__).parse_args()
    results = Results("checks", options)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        command(*LIMNER, "data", "scenes", folder / "data", "--count", 200, "--held-out", 0.1)
        for name, check in checks(folder, options.quick).items():
            results.measure(name, check)
    failed = [name for name, result in results.values.items() if "error" in result]
    print(f"failed: {', '.join(failed) or 'none'}")


def checks(folder: Path, quick: bool) -> dict[str, Callable[[], Any]]:
    """Return the checks by name, in the order in which they run."""
    run = folder / "run"
    tests = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")]

    def parallel(kind: str) -> dict[str, Any]:
        return train(TORCHRUN, folder / kind, "--parallel", kind, "--stages", "dvae", "prior")

    bench = ("bench", "--size", "tiny", "--candidates", 1, "--batch", 0, "--rounds", 1)
    every: dict[str, Callable[[], Any]] = {
        "train": lambda: train(PYTHON, run),
        "draw": lambda: draw(run),
        "resume": lambda: resume(run),
        "zero2": lambda: parallel("zero2"),
        "ddp": lambda: parallel("ddp"),
        "fsdp": lambda: parallel("fsdp"),
        "checkpoints": lambda: command(*TORCHRUN, ROOT / "bench/checkpoints.py", "--size", "base", "--rounds", 2),
        "tests": lambda: command(*PYTHON, "-m", "pytest", "-q", "-n", 0, "-m", "gpu", *tests),
        "compiled drawing": lambda: command(*LIMNER, *bench, "--compiled"),
    }
    return {name: check for name, check in every.items() if name in QUICK or not quick}


def command(*words: object) -> dict[str, Any]:
    """Run a command and return its seconds and the end of its output. Raises `RuntimeError` if it fails."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    start = time.perf_counter()
    process = subprocess.run(
        [str(word) for word in words], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=LIMIT,
    )  # fmt: skip
    if process.returncode:
        raise RuntimeError(f"exit status {process.returncode}\n{process.stdout[-1_500:]}")
    return {"seconds": time.perf_counter() - start, "end of output": process.stdout[-800:]}


def train(program: tuple[str, ...], run: Path, *options: str) -> dict[str, Any]:
    """Train the tiny recipe; return the losses of the prior too."""
    data = run.parent / "data"
    result = command(*program, "-m", "limner", "train", data, "--out", run, *RECIPE.split(), *options)
    return result | {"losses": losses(run)}


def losses(run: Path) -> list[float]:
    """Return the losses of the prior in a run."""
    return [row["loss"] for row in read_metrics(run / "prior/metrics.jsonl")]


def draw(run: Path) -> dict[str, Any]:
    """Draw a picture with the bundle of a run, which is trained if an earlier call has done the check `train`."""
    if not run.exists():
        train(PYTHON, run)
    return command(*LIMNER, "draw", "a red circle", "--model", run, "--output", run / "picture.png")


def resume(run: Path) -> dict[str, Any]:
    """Remove the last checkpoint of the prior and train again, from the one before. Raises `RuntimeError` if a loss is
    another one."""
    if not run.exists():
        train(PYTHON, run)
    before = losses(run)
    shutil.rmtree(run / "prior/checkpoints/step-00000008")
    result = train(PYTHON, run)
    after = result["losses"]
    if len(after) != len(before) or any(abs(a - b) > TOLERANCE * b for a, b in zip(after, before, strict=True)):
        raise RuntimeError(f"losses {before} before, {after} after")
    return result


if __name__ == "__main__":
    main()
