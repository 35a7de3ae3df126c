"""`torchrun … -m limner train`: two processes train what one trains, in all stages, also when one of them is killed,
and when one continues alone."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from checkpoints import read_tensors
from limner import errors
from limner.cli import main
from limner.training.checkpoint import completed
from limner.training.metrics_log import read_metrics

pytestmark = pytest.mark.slow

STAGES = ("dvae", "prior", "contrastive")
STEPS = 24
OPTIONS = [
    *(
        "--recipe",
        "scenes",
        "--dvae",
        "PatchStage",  # which draws no random numbers: these differ between processes
        "--dvae.model.size",
        "48",
        "--dvae.model.vocab",
        "64",
        "--dvae.model.width",
        "8",
        "--contrastive.objective.cut-paste-negatives",
        "0",
    ),
    *("--prior.model.width", "32", "--prior.model.heads", "2", "--prior.model.depth", "2"),
    *("--contrastive.training.batch-size", "16", "--contrastive.model.depth", "1", "--contrastive.model.width", "32"),
    *(word for stage in STAGES for word in (f"--{stage}.training.log-every", "1", f"--{stage}.training.steps", "4")),
    # In bf16 another order of sums makes 3e-4 of a loss.
    *(word for stage in STAGES for word in (f"--{stage}.training.precision", "fp32")),
    *(
        "--prior.training.steps",
        str(STEPS),
        "--prior.training.checkpoint-every",
        "4",
        "--prior.training.batch-size",
        "8",
    ),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("scenes") / "data"
    assert main(["data", "scenes", str(out), "--count", "200", "--held-out", "0.1"]) == 0
    return out


@pytest.fixture(scope="module")
def whole(data: Path) -> Path:
    out = data.parent / "whole"
    assert main(["train", str(data), "--out", str(out), *OPTIONS]) == 0
    return out


def start(data: Path, out: Path, *more: str, ranks: int = 2, restarts: int = 0) -> subprocess.Popen[str]:
    env = {
        **os.environ, "PYTHONPATH": str(Path(errors.__file__).parents[1]), "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--max-restarts"]
    command = [*torchrun, str(restarts), "-m", "limner", "train", str(data), "--out", str(out), *OPTIONS, *more]
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def compare(out: Path, whole: Path, stages: tuple[str, ...] = STAGES) -> None:
    for stage in stages:
        ours, theirs = (read_metrics(folder / stage / "metrics.jsonl") for folder in (out, whole))
        assert [row["step"] for row in ours] == [row["step"] for row in theirs]
        for name in ("loss", "grad_norm", "lr"):
            assert [row[name] for row in ours] == pytest.approx([row[name] for row in theirs], rel=1e-5)
        ours, theirs = (read_tensors(completed(folder / stage)[-1], "model") for folder in (out, whole))
        assert max((ours[name] - theirs[name]).abs().max() for name in theirs) < 1e-4


def wait_for(out: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 240
    while not any(row["step"] >= step for row in read_metrics(out / "prior/metrics.jsonl")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


def workers(agent: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()]


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "zero2"])
def test_two_processes_train_what_one_trains(kind: str, data: Path, whole: Path, tmp_path: Path) -> None:
    process = start(data, tmp_path / "run", "--parallel", kind)
    output, warned = process.communicate(timeout=400)
    assert process.returncode == 0, warned
    assert output.count("run: ") == 1 and warned.count(f"{STEPS}/{STEPS}") == 1  # one of them speaks
    compare(tmp_path / "run", whole)
    assert (tmp_path / "run/bundle/config.json").exists()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are found in Linux's /proc")
def test_a_killed_process_restarts_and_one_process_continues_alone(
    data: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, stages = tmp_path / "run", ("--stages", "dvae", "prior")
    process = start(data, out, *stages, restarts=1)
    wait_for(out, 6, process)
    os.kill(workers(process)[1], signal.SIGKILL)  # the one that writes nothing
    wait_for(out, 12, process)
    process.send_signal(signal.SIGINT)
    _, warned = process.communicate(timeout=400)
    # torchrun's message: it may end the other process before that reports why (test_processes.py has the sentence).
    assert "exitcode: -9" in warned and "resuming from" in warned
    assert process.returncode != 0 and len(read_metrics(out / "prior/metrics.jsonl")) < STEPS
    capsys.readouterr()
    assert main(["train", str(data), "--out", str(out), *OPTIONS, *stages]) == 0
    assert "2 ranks: results may differ" in capsys.readouterr().err
    compare(out, whole, ("dvae", "prior"))


def test_shards_of_replicas_resume_as_other_shards(data: Path, whole: Path, tmp_path: Path) -> None:
    """Four processes that hold two replicas in halves, with moments in 16 bits; then two that hold one."""
    out, one = tmp_path / "run", tmp_path / "one"
    more = ("--stages", "prior", "--prior.training.accumulate", "2", "--prior.training.optimizer", "AdamW16")
    for folder in (out, one):
        shutil.copytree(whole / "dvae", folder / "dvae")
    process = start(data, out, *more, "--parallel", "fsdp", "--dp-replicate", "2", ranks=4)
    wait_for(out, 6, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=400)
    assert 6 <= len(read_metrics(out / "prior/metrics.jsonl")) < STEPS
    process = start(data, out, *more, "--parallel", "fsdp")
    _, warned = process.communicate(timeout=400)
    assert process.returncode == 0 and "resuming from" in warned, warned
    assert warned.count("4 ranks: results may differ") == 1  # one of them warns
    assert main(["train", str(data), "--out", str(one), *OPTIONS, *more]) == 0
    compare(out, one, ("prior",))
    ours, theirs = (read_tensors(completed(folder / "prior")[-1], "optimizer") for folder in (out, one))
    assert ours.keys() == theirs.keys() and any(x.dtype == torch.int16 for x in ours.values())
    assert all(ours[name].shape == theirs[name].shape for name in theirs)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--dvae.training.batch-size", "5"), "a batch of 5 cannot be divided among 2 ranks: choose a multiple of 2"),
        (("--parallel", "fsdp", "--dp-replicate", "3"), "2 processes cannot hold 3 replicas: choose a divisor of 2"),
    ],
)
def test_indivisible_settings_are_reported_in_a_sentence(
    options: tuple[str, ...], says: str, data: Path, tmp_path: Path
) -> None:
    process = start(data, tmp_path / "run", *options)
    _, warned = process.communicate(timeout=400)
    assert process.returncode != 0
    assert f"limner: {says}" in warned
    assert "Traceback" not in warned.partition("ChildFailedError")[0].partition("torch/distributed/elastic")[0]


def test_without_torchrun_half_an_environment_is_refused(data: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert main(["train", str(data), "--out", str(tmp_path / "run"), *OPTIONS]) == 2
    assert "MASTER_ADDR" in (output := capsys.readouterr().err) and "torchrun" in output
    monkeypatch.delenv("RANK")
    assert main(["train", str(data), "--out", str(tmp_path / "run"), *OPTIONS, "--parallel", "fsdp"]) == 2
    assert "start them with torchrun" in capsys.readouterr().err


def test_a_port_in_use_is_reported_in_a_sentence(data: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in alone.items():
            monkeypatch.setenv(name, value)
        assert main(["train", str(data), "--out", str(tmp_path / "run"), *OPTIONS]) == 2
    output = capsys.readouterr().err
    assert f"process 0 cannot reach its peers at 127.0.0.1:{port}" in output and "Traceback" not in output
