"""Two gloo processes against one on the same global batches: a small prior, whose loss knows the whole batch.

The worker below is one rank. On the way both ranks are killed once, and once a signal reaches one of them only.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributed

from limner import errors
from limner.data.stream import Stream
from limner.distributed.replicated import Replicated
from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Fp32
from limner.objectives.autoregressive import Autoregressive
from limner.optim.optimizers import AdamWConfig
from limner.optim.schedules import Plateau
from limner.training.checkpoint import completed, read_groups
from limner.training.config import TrainConfig
from limner.training.loop import Interrupted, train
from limner.training.metrics_log import read_metrics
from limner.training.parallel import Parallel, SingleProcess
from limner.training.train_state import TrainState

STEPS = 20


class Tokens:
    """Captions of one to eight tokens, the rest padding."""

    def __len__(self) -> int:
        return 50

    def batch(self, indices: np.ndarray, seeds: np.ndarray) -> dict[str, Tensor]:
        rng = [np.random.default_rng(seed) for seed in seeds]
        text = np.stack(
            [np.where(np.arange(8) <= i % 8, r.integers(0, 20, 8), -1) for i, r in zip(indices, rng, strict=True)]
        )
        image = np.stack([r.integers(0, 4, 9) + (i % 3) for i, r in zip(indices, rng, strict=True)])
        return {"text": torch.from_numpy(text), "image": torch.from_numpy(image)}


class Slow(Autoregressive):
    def __call__(self, *arguments: Any) -> tuple[Tensor, dict[str, Tensor]]:
        time.sleep(float(os.environ.get("SECONDS_PER_STEP", "0")))
        return super().__call__(*arguments)


def work(out: Path, parallel: Parallel) -> None:
    torch.manual_seed(0)
    model = TransformerConfig(
        text_vocab=20, image_vocab=8, text_len=8, grid=(3, 3), width=16, depth=2, heads=2, kernel=3
    )
    config = TrainConfig(
        steps=STEPS, batch_size=8, accumulate=2, optimizer=AdamWConfig(lr=0.01, eps=1e-2), clip_norm=0.5, ema_decay=0.9,
        schedule=Plateau(window=3), precision=Fp32(), log_every=1, checkpoint_every=4,
    )  # fmt: skip
    stream = Stream(Tokens(), 8, seed=3, prefetch=1)
    try:
        train(TrainState(model.build(), Slow(), config, parallel=parallel), stream, out)
    except Interrupted:
        sys.exit(130)
    finally:
        stream.close()


@contextmanager
def working(out: Path, seconds_per_step: float = 0.0) -> Iterator[list[subprocess.Popen]]:
    """Two ranks on `out`, which do not outlive the block."""
    env = {
        **os.environ,
        "PYTHONPATH": str(Path(errors.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "SECONDS_PER_STEP": str(seconds_per_step),
    }
    out.mkdir(exist_ok=True)
    meeting = out / f"meeting-{time.monotonic_ns()}"
    command = [sys.executable, __file__, str(out), str(meeting)]
    ranks = [subprocess.Popen([*command, str(rank)], env=env) for rank in range(2)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def wait_for(out: Path, step: int, ranks: list[subprocess.Popen]) -> None:
    deadline = time.monotonic() + 120
    while not any(row["step"] >= step for row in read_metrics(out / "metrics.jsonl")):
        assert all(rank.poll() is None for rank in ranks) and time.monotonic() < deadline
        time.sleep(0.01)


def to_the_end(out: Path) -> None:
    with working(out) as ranks:
        assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]


def compare(out: Path, whole: Path) -> None:
    ours, theirs = (read_metrics(folder / "metrics.jsonl") for folder in (out, whole))
    assert [row["step"] for row in ours] == list(range(1, STEPS + 1))
    for name in ("loss", "text", "image", "grad_norm", "lr"):
        assert [row[name] for row in ours] == pytest.approx([row[name] for row in theirs], rel=1e-6, abs=1e-6)
    for name in ("model", "ema"):
        ours, theirs = (read_groups(completed(folder)[-1], (name,))[name] for folder in (out, whole))
        assert list(ours) == list(theirs)
        for key, value in ours.items():
            torch.testing.assert_close(value, theirs[key], rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    work(out, SingleProcess())
    return out


@pytest.mark.slow
def test_two_ranks_equal_one_process_after_interruptions(whole: Path, tmp_path: Path) -> None:
    with working(tmp_path, 0.05) as ranks:
        wait_for(tmp_path, 5, ranks)
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
        assert [rank.wait(timeout=60) for rank in ranks] == [-signal.SIGKILL] * 2
    with working(tmp_path, 0.05) as ranks:
        wait_for(tmp_path, 9, ranks)
        ranks[1].send_signal(signal.SIGTERM)  # the one that writes nothing
        assert [rank.wait(timeout=60) for rank in ranks] == [130, 130]
    saved = int(completed(tmp_path)[-1].name.removeprefix("step-"))
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == saved < STEPS
    to_the_end(tmp_path)
    compare(tmp_path, whole)


if __name__ == "__main__":
    out, meeting, rank = sys.argv[1:]
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=2)
    try:
        work(Path(out), Replicated())
    finally:
        distributed.destroy_process_group()
