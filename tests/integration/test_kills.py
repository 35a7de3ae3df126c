"""`bench/kills.py`: a run continues when a worker or a machine is killed, and when the machine comes back."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from limner import errors

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="workers are found in Linux's /proc")
@pytest.mark.parametrize(("agents", "kills"), [("1", "1"), ("2", "2")])
def test_a_run_survives_kills(agents: str, kills: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(errors.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "bench/kills.py"), "--kills", kills, "--agents", agents, "--seed", "1"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    row = re.split(r"\s+", done.stdout.splitlines()[-1])
    assert row[0] == agents and int(row[1]) + int(row[2]) == int(kills) and row[3] == "0"
