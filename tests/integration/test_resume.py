"""A run that is killed and later interrupted against the same run without interruption.

The worker below is a separate process: a small model with dropout, noise from the objective's generator, averaging, a
plateau schedule and evaluation, so that state missing from a checkpoint shows in a loss.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from limner import errors
from limner.atomic_io import LOCK
from limner.data.stream import Stream
from limner.optim.schedules import Plateau
from limner.training.checkpoint import completed
from limner.training.config import TrainConfig
from limner.training.loop import Interrupted, train
from limner.training.metrics_log import read_metrics
from limner.training.train_state import TrainState

STEPS = 80


class Points:
    def __len__(self) -> int:
        return 50

    def batch(self, indices: np.ndarray, seeds: np.ndarray) -> dict[str, torch.Tensor]:
        x = [np.random.default_rng(seed).standard_normal(8) * (1 + i) for i, seed in zip(indices, seeds, strict=True)]
        return {"x": torch.from_numpy(np.stack(x)).float()}


def objective(model: nn.Module, batch: dict, step: int, generator: torch.Generator):
    x = batch["x"] + torch.randn(batch["x"].shape, generator=generator)
    loss = (model(x) - x.abs().mean(1, keepdim=True)).square().mean()
    time.sleep(float(os.environ.get("SECONDS_PER_STEP", "0")))
    return loss, {"root": loss.detach().sqrt()}


def work(out: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 1))
    config = TrainConfig(
        steps=STEPS,
        batch_size=8,
        accumulate=2,
        log_every=1,
        checkpoint_every=4,
        eval_every=10,
        ema_decay=0.99,
        schedule=Plateau(window=5),
    )

    def evaluate(model: nn.Module, step: int) -> dict[str, float]:
        return {"at_zero": model(torch.zeros(1, 8)).item()}

    try:
        train(TrainState(model, objective, config), Stream(Points(), 8, seed=3, prefetch=2), out, evaluate=evaluate)
    except Interrupted as stop:
        print(stop)
        sys.exit(130)


@contextmanager
def working(out: Path, seconds_per_step: float = 0.0) -> Iterator[subprocess.Popen]:
    """A worker on `out`, which does not outlive the block."""
    env = {
        **os.environ,
        "PYTHONPATH": str(Path(errors.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "SECONDS_PER_STEP": str(seconds_per_step),
    }
    command = [sys.executable, __file__, str(out)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as worker:
        try:
            yield worker
        finally:
            worker.kill()


def send_after(out: Path, number: int, step: int) -> tuple[int, bytes]:
    """Start the worker, send a signal once it has logged `step`; its exit code and output."""
    with working(out, seconds_per_step=0.01) as worker:
        deadline = time.monotonic() + 60
        while not any(row["step"] >= step for row in read_metrics(out / "metrics.jsonl")):
            assert worker.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        worker.send_signal(number)
        output, _ = worker.communicate(timeout=60)
        return worker.returncode, output


@pytest.mark.slow
def test_a_run_survives_what_happens_to_it(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    code, _ = send_after(parts, signal.SIGKILL, 22)
    reached = read_metrics(parts / "metrics.jsonl")[-1]["step"]
    saved = int(completed(parts)[-1].name.removeprefix("step-"))
    assert code == -signal.SIGKILL and reached - 4 <= saved < STEPS

    code, output = send_after(parts, signal.SIGINT, reached + 15)
    saved = int(completed(parts)[-1].name.removeprefix("step-"))
    assert code == 130 and f"after step {saved}".encode() in output
    assert read_metrics(parts / "metrics.jsonl")[-1]["step"] == saved  # nothing is lost

    with working(whole) as a, working(parts) as b:
        assert a.wait(timeout=60) == b.wait(timeout=60) == 0
    a, b = (read_metrics(out / "metrics.jsonl") for out in (whole, parts))
    clocks = {"seconds", "samples_per_s"}
    strip = lambda rows: [{k: v for k, v in row.items() if k not in clocks} for row in rows]  # noqa: E731
    assert [row["step"] for row in b] == list(range(1, STEPS + 1))
    assert strip(a) == strip(b)
    for name in ("model", "ema", "optimizer", "rng"):
        files = [completed(out)[-1] / f"{name}.safetensors" for out in (whole, parts)]
        assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.slow
def test_a_disconnected_process_cannot_overwrite_its_successor(tmp_path: Path) -> None:
    """The first one stands still, as a machine that lost the network does, while another one that does not see its lock
    resumes from its checkpoint and ends the run."""
    with working(tmp_path, seconds_per_step=0.01) as first:
        deadline = time.monotonic() + 60
        while not completed(tmp_path):
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        first.send_signal(signal.SIGSTOP)
        (tmp_path / LOCK).unlink()
        with working(tmp_path) as second:
            assert second.wait(timeout=60) == 0
        done = completed(tmp_path)
        before = {path: path.read_bytes() for path in done[-1].iterdir()}
        first.send_signal(signal.SIGCONT)
        _, error = first.communicate(timeout=60)
    assert first.returncode == 1
    assert b"(start 2; this is start 1): this process stops without saving" in error
    assert completed(tmp_path) == done and {path: path.read_bytes() for path in done[-1].iterdir()} == before


if __name__ == "__main__":
    work(sys.argv[1])
