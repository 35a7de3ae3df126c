"""Environment variables for torch's threads, in processes without torch."""

import json
import os
import subprocess
import sys

import pytest

from limner import openmp

VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")
CODE = """
import json, os, sys
import limner
from limner import openmp
openmp.busy_threads_elsewhere = lambda: {busy}
openmp.physical_cores = lambda: 4
os.cpu_count = lambda: 8
message = openmp.bound_threads()
print(json.dumps([message] + [os.environ.get(name) for name in {names}]))
"""


def settings(busy: int, before: str = "", **environment: str) -> list[str | None]:
    """The message and the variables after `import limner` on 4 cores of 8, `busy` other threads running."""
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    code = before + CODE.format(busy=busy, names=VARIABLES)
    done = subprocess.run(
        [sys.executable, "-c", code], env=inherited | environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize(("busy", "threads"), [(0, None), (4, None), (5, "3"), (7, "1"), (30, "1")])
def test_a_process_takes_as_many_threads_as_cores_are_idle(busy, threads):
    message, spin, policy, count = settings(busy)
    assert (spin, policy, count) == (str(openmp.SPIN_COUNT), None, threads)
    assert (f"{threads} of 4 threads, because {busy} other threads are running" in message) == bool(threads)


@pytest.mark.parametrize("name", VARIABLES)
def test_variables_of_the_user_are_kept(name):
    environment = {name: {"OMP_WAIT_POLICY": "passive"}.get(name, "77")}
    defaults = {"GOMP_SPINCOUNT": str(openmp.SPIN_COUNT)} if name == "OMP_NUM_THREADS" else {"OMP_NUM_THREADS": "1"}
    _, *values = settings(30, **environment)
    assert dict(zip(VARIABLES, values, strict=True)) == {**dict.fromkeys(VARIABLES), **defaults, **environment}


def test_nothing_is_set_once_torch_is_imported():
    assert settings(30, before="import sys; sys.modules['torch'] = None\n") == ["", None, None, None]


@pytest.mark.skipif(not os.path.exists("/proc/loadavg"), reason="the number of running threads is not known here")
def test_busy_loops_count_as_running():
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        assert any(openmp.busy_threads_elsewhere() >= 3 for _ in range(200))
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
