"""A training run whose workers and machines are killed at random moments, against one that is left alone.

    python bench/kills.py --kills 100

`torchrun` trains a small prior, first in one agent with two workers, then in two agents with a worker each, which meet
by `--nnodes 1:2`. They meet at a store in a process of its own (`is_host=0`): in an agent it would die with that, and
the other one could not go on. Workers do not share it (`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`): where they do, torch
2.13's agent that has lived on does not say its address again, and one that comes back waits for it and gives up. A kill
hits a worker, or an agent with its workers, as when a machine dies; an agent that is gone comes back after a while, and
until then the other one goes on alone. Nobody else does anything: workers are started anew by their agent. A run is
lost if it has to be started by hand, or does not end.

With one agent the world has the same size throughout, so weights must be the same bits. With two it changes, and losses
must agree to 1e-5. Linux only: workers are found in /proc.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from limner import errors
from limner.training.checkpoint import completed, read_groups
from limner.training.metrics_log import read_metrics

EVERY = 4  # updates between checkpoints
SMALL = [
    *("--recipe", "scenes", "--dvae.model.vocab", "64", "--dvae.model.width", "8", "--dvae.training.steps", "4"),
    *("--prior.model.width", "32", "--prior.model.heads", "2", "--prior.model.depth", "2"),
    *("--prior.training.batch-size", "8", "--prior.training.log-every", "1"),
    *("--prior.training.checkpoint-every", str(EVERY), "--prior.training.eval-every", "1000000"),
]
PER_KILL = 100  # updates, so that there are some left when the last kill has come
PATIENCE = 300.0  # seconds without progress after which a run is lost


class Agents:
    """The agents of a run, each with its workers."""

    def __init__(self, data: Path, out: Path, count: int, steps: int) -> None:
        self.data, self.out, self.count, self.steps = data, out, count, steps
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        store = f"TCPStore('127.0.0.1', {self.port}, is_master=True, wait_for_workers=False)"
        hosting = f"import time; from torch.distributed import TCPStore; store = {store}; time.sleep(1e6)"
        self.store = subprocess.Popen([sys.executable, "-c", hosting]) if count > 1 else None
        self.meeting = 0  # an agent that gives up closes a meeting for all who are yet to come
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.log = (out.parent / f"{out.name}.log").open("ab")

    def start(self, number: int) -> None:
        meet = [
            "--nnodes", f"1:{self.count}", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}",
            "--rdzv-id", f"kills-{self.meeting}",
            "--rdzv-conf", "is_host=0,last_call_timeout=2,join_timeout=300,timeout=300",
        ] if self.count > 1 else []  # fmt: skip
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(3 - self.count), "--max-restarts",
            "1000000", "--monitor-interval", "0.1", *meet, "-m", "limner", "train", str(self.data), "--out",
            str(self.out), *SMALL, "--prior.training.steps", str(self.steps), "--stages", "prior",
        ]  # fmt: skip
        env = {
            **os.environ, "PYTHONPATH": str(Path(errors.__file__).parents[1]), "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }  # fmt: skip
        self.processes[number] = subprocess.Popen(command, env=env, stdout=self.log, stderr=self.log)

    def workers(self, number: int) -> list[int]:
        pid = self.processes[number].pid
        try:
            return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except OSError:  # it has just ended
            return []

    def kill_worker(self, number: int, which: float) -> bool:
        """One of those that are there; whether one was."""
        if found := self.workers(number):
            kill(found[int(which * len(found))])
        return bool(found)

    def kill_machine(self, number: int) -> None:
        """An agent first, so that it does not see its workers die."""
        workers = self.workers(number)
        self.processes[number].kill()
        self.processes.pop(number).wait()
        for worker in workers:
            kill(worker)

    def end(self) -> None:
        for number in list(self.processes):
            self.kill_machine(number)
        if self.store:
            self.store.kill()
            self.store.wait()
        self.log.close()


def kill(pid: int) -> None:
    """SIGKILL, to a process that may be gone already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def reached(out: Path) -> int:
    """Updates of the newest checkpoint."""
    found = completed(out / "prior")
    return int(found[-1].name.removeprefix("step-")) if found else 0


def survive(agents: Agents, kills: int, rng: random.Random) -> tuple[Counter[str], int]:
    """Kill until so many kills have come and the run has ended: kills by kind, and how often the run was lost."""
    found: Counter[str] = Counter()
    lost = 0
    for number in range(agents.count):
        agents.start(number)
    before, changed, away, due = 0, time.monotonic(), {}, float("inf")
    while reached(agents.out) < agents.steps or any(p.poll() is None for p in agents.processes.values()):
        time.sleep(0.02)
        now = time.monotonic()
        if (step := reached(agents.out)) != before:
            before, changed = step, now
            due = min(due, now + rng.uniform(0, 2))
        for number in [number for number, back in away.items() if now > back]:
            del away[number]
            agents.start(number)
        ended = [number for number, p in agents.processes.items() if p.poll() not in (None, 0)]
        if ended or now - changed > PATIENCE:
            lost, changed = lost + 1, now
            agents.meeting += 1
            for number in list(agents.processes):
                agents.kill_machine(number)
                agents.start(number)
        if found.total() < kills and now > due and before < agents.steps:
            number = rng.choice([n for n in agents.processes if agents.processes[n].poll() is None] or [-1])
            if number < 0:
                continue
            if rng.random() < 0.5:
                found["workers"] += agents.kill_worker(number, rng.random())
            else:
                agents.kill_machine(number)
                found["machines"] += 1
                away[number] = now + rng.uniform(0, 10 if agents.count > 1 else 1)
            # Most kills come after the next checkpoint, some hit a run that has not begun again yet.
            due = now + rng.uniform(0, 10) if rng.random() < 0.2 else float("inf")
    return found, lost


def compare(ours: Path, theirs: Path) -> tuple[bool, float]:
    """Whether the last weights are the same bits, and by how much losses differ at most, relatively."""
    a, b = (read_groups(completed(out / "prior")[-1], ("model",))["model"] for out in (ours, theirs))
    same = all(torch.equal(a[name], b[name]) for name in b)
    rows = [{row["step"]: row["loss"] for row in read_metrics(out / "prior/metrics.jsonl")} for out in (ours, theirs)]
    if rows[0].keys() != rows[1].keys():
        return False, float("inf")
    return same, max(abs(rows[0][step] / loss - 1) for step, loss in rows[1].items())


def main() -> None:
    """Kill runs of one agent and of two, and compare each with one that was left alone."""
    parser = argparse.ArgumentParser(description="training under random kills")
    parser.add_argument("--kills", type=int, default=100, help="of both runs together")
    parser.add_argument("--agents", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="for the runs and what they say; a temporary one by default")
    options = parser.parse_args()
    if not Path("/proc/self/task").exists():
        sys.exit("workers are found in /proc, which only Linux has")
    each = options.kills // len(options.agents)
    steps = PER_KILL * each + 24
    env = {**os.environ, "PYTHONPATH": str(Path(errors.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    limner = [sys.executable, "-m", "limner"]
    good = True
    print(f"torch {torch.__version__}; {steps} updates, a checkpoint every {EVERY}; seed {options.seed}\n")
    print(
        f"{'agents':8}{'workers killed':>16}{'machines killed':>17}{'lost':>6}{'same weights':>14}{'losses differ':>15}"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder or Path(name)
        data, alone = folder / "data", folder / "alone"
        quiet = {"env": env, "check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run([*limner, "data", "scenes", str(data), "--count", "200", "--held-out", "0.1"], **quiet)
        train = [*limner, "train", str(data), *SMALL, "--prior.training.steps", str(steps), "--out"]
        subprocess.run([*train, str(folder / "begun"), "--stages", "dvae"], **quiet)
        for count in options.agents:
            out, alone = folder / f"killed-{count}", folder / f"alone-{count}"
            for run in (out, alone):
                subprocess.run(["cp", "-r", str(folder / "begun"), str(run)], check=True)
            agents = Agents(data, out, count, steps)
            begun = time.monotonic()
            try:
                found, lost = survive(agents, each, random.Random(options.seed + count))
            finally:
                agents.end()
            took = time.monotonic() - begun
            agents = Agents(data, alone, count, steps)
            try:
                survive(agents, 0, random.Random(0))
            finally:
                agents.end()
            same, differ = compare(out, alone)
            good &= not lost and (same if count == 1 else differ < 1e-5)
            row = f"{count:<8}{found['workers']:>16}{found['machines']:>17}{lost:>6}{'yes' if same else 'no':>14}"
            print(f"{row}{differ:>15.1e}   in {took:.0f} s", flush=True)
    if not good:
        sys.exit("a run was lost, or is another one than without kills")


if __name__ == "__main__":
    main()
