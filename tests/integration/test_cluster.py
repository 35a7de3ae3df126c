"""The templates in `examples/cluster`: their commands train, with the variables that each scheduler sets."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from limner import errors
from limner.cli import main
from limner.training.checkpoint import completed
from limner.training.metrics_log import read_metrics

pytestmark = pytest.mark.slow

CLUSTER = Path(__file__).parents[2] / "examples/cluster"
OPTIONS = [
    *("--recipe", "scenes", "--dvae.model.vocab", "64", "--dvae.model.width", "8", "--stages", "dvae"),
    *("--dvae.training.batch-size", "8", "--dvae.training.log-every", "1", "--dvae.training.checkpoint-every", "4"),
]
# The fields that SkyPilot's and Trainer's own references have.
SKY = {"name", "num_nodes", "resources", "workdir", "volumes", "envs", "setup", "run", "file_mounts", "secrets"}
TRAINER = {"image", "numNodes", "numProcPerNode", "resourcesPerNode", "env", "command", "args"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("scenes") / "data"
    assert main(["data", "scenes", str(out), "--count", "100", "--held-out", "0.1"]) == 0
    return out


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """With commands that stand for Slurm's: `srun` runs a command here, `scontrol` writes down what it was asked."""
    tools = tmp_path / "tools"
    tools.mkdir()
    scripts = {
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"',
        "scontrol": f'if [ "$1" = show ]; then echo localhost; else echo "$@" >> {tmp_path}/asked; fi',
        "torchrun": f'echo "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" >> {tmp_path}/patience\n'
        f'exec {sys.executable} -m torch.distributed.run "$@"',
    }
    for name, script in scripts.items():
        (tools / name).write_text(f"#!/bin/bash\n{script}\n")
        (tools / name).chmod(0o755)
    return {
        **os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(Path(errors.__file__).parents[1]),
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip


def port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def patience(tmp_path: Path) -> int:
    """Seconds that torchrun waits for processes that save before it kills them, by default: 30."""
    (seconds,) = set((tmp_path / "patience").read_text().splitlines())
    return int(seconds)


def steps(out: Path) -> int:
    return len(read_metrics(out / "dvae/metrics.jsonl"))


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_a_slurm_job_saves_before_its_time_is_over_and_resumes(data: Path, env: dict[str, str], tmp_path: Path) -> None:
    script, out = CLUSTER / "slurm.sh", tmp_path / "run"
    subprocess.run(["bash", "-n", script], check=True)
    env |= {"SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "2"}
    env |= {"SLURM_JOB_ID": "7", "PORT": port()}
    command = ["bash", str(script), str(data), str(out), *OPTIONS, "--dvae.training.steps"]
    with subprocess.Popen([*command, "100000"], env=env, stderr=subprocess.PIPE, text=True) as job:
        deadline = time.monotonic() + 120
        while steps(out) < 6:
            assert job.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        job.send_signal(signal.SIGTERM)
        _, output = job.communicate(timeout=120)
    assert job.returncode == 0, output
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
    reached = steps(out)
    assert completed(out / "dvae")[-1].name == f"step-{reached:08d}"  # nothing is lost
    again = subprocess.run([*command, str(reached + 3)], env={**env, "SLURM_RESTART_COUNT": "1", "PORT": port()})
    assert again.returncode == 0 and steps(out) == reached + 3
    failed = subprocess.run([*command, "no number"], env={**env, "PORT": port()}, capture_output=True)
    given = int(re.findall(r"--signal=B:TERM@(\d+)", script.read_text())[0])
    assert 30 < patience(tmp_path) < given
    assert failed.returncode != 0 and (tmp_path / "asked").read_text() == "requeue 7\n"  # which would never end


def trained(command: str, out: Path, env: dict[str, str]) -> None:
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert steps(out) == 5


def test_a_skypilot_task_trains(data: Path, env: dict[str, str], tmp_path: Path) -> None:
    task: dict[str, Any] = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    assert set(task) <= SKY and set(task["envs"]) == {"DATA", "RUN", "OPTIONS"}
    out = tmp_path / "run"
    env |= {"DATA": str(data), "RUN": str(out), "OPTIONS": " ".join([*OPTIONS, "--dvae.training.steps", "5"])}
    env |= {"SKYPILOT_NODE_IPS": "127.0.0.1", "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0"}
    trained(task["run"].replace("29500", port()), out, env | {"SKYPILOT_NUM_GPUS_PER_NODE": "2"})
    assert patience(tmp_path) > 30


def test_a_kubeflow_job_trains(data: Path, env: dict[str, str], tmp_path: Path) -> None:
    job: dict[str, Any] = yaml.safe_load((CLUSTER / "kubeflow.yaml").read_text())
    assert job["kind"] == "TrainJob" and job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    trainer = job["spec"]["trainer"]
    assert set(job["spec"]) == {"runtimeRef", "trainer"} and set(trainer) <= TRAINER
    given = {one["name"]: one["value"] for one in trainer["env"]}
    assert trainer["command"] == ["bash", "-c"] and set(given) == {
        "DATA", "RUN", "OPTIONS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
    }  # fmt: skip
    out = tmp_path / "run"
    env |= given | {"DATA": str(data), "RUN": str(out), "OPTIONS": " ".join([*OPTIONS, "--dvae.training.steps", "5"])}
    env |= {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "127.0.0.1"}
    trained(trainer["args"][0], out, env | {"PET_MASTER_PORT": port()})
    assert patience(tmp_path) > 30
