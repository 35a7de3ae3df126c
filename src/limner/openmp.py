"""Settings of OpenMP, which runs torch's CPU operations on several threads.

Between operations the threads of libgomp spin, by default for 300,000 iterations. On a busy machine they take cores
from the operation that they wait for. 10,000 iterations cost nothing on an idle machine. Passive waiting there
(`OMP_WAIT_POLICY=passive`) makes a step of one candidate take 1.7 times as long. A thread without a core delays every
operation, so a process starts with as many threads as there are idle cores.

libgomp reads its settings when torch is imported. Variables set by the user are kept.
"""

import os
import sys
import time

SPIN_COUNT = 10_000
_SAMPLES = 5  # of the number of running threads, of which the minimum is used
_SAMPLE_SECONDS = 0.003


def bound_spinning() -> None:
    """Shorten the spinning of idle threads. Does nothing if torch is imported or the user has set a wait policy."""
    if "torch" not in sys.modules and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


def bound_threads() -> str:
    """Limit the threads to the number of idle cores. Does nothing if torch is imported or `OMP_NUM_THREADS` is set.

    Returns a message for the user, "" without a change. Rounding may depend on the number of threads.
    """
    if "torch" in sys.modules or "OMP_NUM_THREADS" in os.environ or not hasattr(os, "sched_getaffinity"):
        return ""
    cores, busy = physical_cores(), busy_threads_elsewhere()
    threads = max(1, min(cores, (os.cpu_count() or 1) - busy))
    if threads == cores:
        return ""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    return f"{threads} of {cores} threads, because {busy} other threads are running: OMP_NUM_THREADS overrides this"


def physical_cores() -> int:
    """Return the number of physical cores that this process may use, torch's default number of threads."""
    cpus = os.sched_getaffinity(0)
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    try:
        return len({_read(topology.format(cpu)) for cpu in cpus})
    except OSError:
        return len(cpus)


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def busy_threads_elsewhere() -> int:
    """Return the number of other threads on the machine that run or wait for a core; 0 without /proc/loadavg."""
    counts = []
    try:
        for _ in range(_SAMPLES):
            counts.append(int(_read("/proc/loadavg").split()[3].partition("/")[0]) - 1)
            time.sleep(_SAMPLE_SECONDS)
    except (OSError, ValueError, IndexError):
        return 0
    return max(0, min(counts))
