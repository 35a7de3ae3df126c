"""Training under random kills of workers and machines, compared with an undisturbed run.

    python bench/kills.py --kills 100

`torchrun` trains a small prior, first in one agent with two workers, then in two agents with one worker each that
rendezvous with `--nnodes 1:2`. The rendezvous store is a separate process (`is_host=0`): a store inside an agent would
die with it, and the surviving agent could not continue. Workers do not share it
(`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`): if they do, the surviving agent of torch 2.13 does not publish its address
again, and a restarted agent waits for it until its timeout. A kill hits a worker, or an agent with its workers, which
stands in for the loss of a machine. A killed agent restarts after a delay, and until then the other one trains alone.
Agents restart their workers without other intervention. A run counts as lost if it needs a manual restart or does not
end.

With one agent the world size is constant, so final weights must be bit-identical. With two agents it changes, and
losses must agree within 1e-5. Linux only: workers are found in /proc.
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

CHECKPOINT_EVERY = 4  # updates between checkpoints
SMALL = [
    *("--recipe", "scenes", "--dvae.model.vocab", "64", "--dvae.model.width", "8", "--dvae.training.steps", "4"),
    *("--prior.model.width", "32", "--prior.model.heads", "2", "--prior.model.depth", "2"),
    *("--prior.training.batch-size", "8", "--prior.training.log-every", "1"),
    *("--prior.training.checkpoint-every", str(CHECKPOINT_EVERY), "--prior.training.eval-every", "1000000"),
]
UPDATES_PER_KILL = 100  # enough that the last kill hits a running job
TIMEOUT = 300.0  # seconds without progress until a run counts as lost


class Agents:
    """Agents of a run, each with its workers."""

    def __init__(self, data: Path, out: Path, count: int, steps: int) -> None:
        self.data, self.out, self.count, self.steps = data, out, count, steps
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        store = f"TCPStore('127.0.0.1', {self.port}, is_master=True, wait_for_workers=False)"
        hosting = f"import time; from torch.distributed import TCPStore; store = {store}; time.sleep(1e6)"
        self.store = subprocess.Popen([sys.executable, "-c", hosting]) if count > 1 else None
        self.rendezvous = 0  # id; an agent that gives up closes its rendezvous for later agents
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.log = (out.parent / f"{out.name}.log").open("ab")

    def start(self, number: int) -> None:
        meet = [
            "--nnodes", f"1:{self.count}", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}",
            "--rdzv-id", f"kills-{self.rendezvous}",
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
        except OSError:  # the process ended
            return []

    def kill_worker(self, number: int, which: float) -> bool:
        """Kill one of the workers; return False for an agent without workers."""
        if workers := self.workers(number):
            kill(workers[int(which * len(workers))])
        return bool(workers)

    def kill_machine(self, number: int) -> None:
        """Kill an agent, then its workers, so that the agent does not observe their end."""
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
    """Send SIGKILL, ignoring processes that ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def reached(out: Path) -> int:
    """Return the step of the newest checkpoint."""
    checkpoints = completed(out / "prior")
    return int(checkpoints[-1].name.removeprefix("step-")) if checkpoints else 0


def survive(agents: Agents, kills: int, rng: random.Random) -> tuple[Counter[str], int]:
    """Kill until the run has ended; return the kills by kind and the number of manual restarts."""
    killed: Counter[str] = Counter()
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
        if ended or now - changed > TIMEOUT:
            lost, changed = lost + 1, now
            agents.rendezvous += 1
            for number in list(agents.processes):
                agents.kill_machine(number)
                agents.start(number)
        if killed.total() < kills and now > due and before < agents.steps:
            number = rng.choice([n for n in agents.processes if agents.processes[n].poll() is None] or [-1])
            if number < 0:
                continue
            if rng.random() < 0.5:
                killed["workers"] += agents.kill_worker(number, rng.random())
            else:
                agents.kill_machine(number)
                killed["machines"] += 1
                away[number] = now + rng.uniform(0, 10 if agents.count > 1 else 1)
            # Most kills follow the next checkpoint, some hit a run that is still restarting.
            due = now + rng.uniform(0, 10) if rng.random() < 0.2 else float("inf")
    return killed, lost


def compare(ours: Path, theirs: Path) -> tuple[bool, float]:
    """Return True if the final weights are bit-identical, and the maximum relative difference of losses."""
    a, b = (read_groups(completed(out / "prior")[-1], ("model",))["model"] for out in (ours, theirs))
    same = all(torch.equal(a[name], b[name]) for name in b)
    rows = [{row["step"]: row["loss"] for row in read_metrics(out / "prior/metrics.jsonl")} for out in (ours, theirs)]
    if rows[0].keys() != rows[1].keys():
        return False, float("inf")
    return same, max(abs(rows[0][step] / loss - 1) for step, loss in rows[1].items())


def main() -> None:
    """Run one agent and two agents under kills, and compare each with an undisturbed run."""
    parser = argparse.ArgumentParser(description="training under random kills")
    parser.add_argument("--kills", type=int, default=100, help="kills of both runs together")
    parser.add_argument("--agents", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="for runs and logs; a temporary folder by default")
    options = parser.parse_args()
    if not Path("/proc/self/task").exists():
        sys.exit("finding workers needs /proc: run this on Linux")
    each = options.kills // len(options.agents)
    steps = UPDATES_PER_KILL * each + 24
    env = {**os.environ, "PYTHONPATH": str(Path(errors.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    limner = [sys.executable, "-m", "limner"]
    good = True
    print(f"torch {torch.__version__}; {steps} updates, a checkpoint every {CHECKPOINT_EVERY}; seed {options.seed}\n")
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
            start = time.monotonic()
            try:
                killed, lost = survive(agents, each, random.Random(options.seed + count))
            finally:
                agents.end()
            seconds = time.monotonic() - start
            agents = Agents(data, alone, count, steps)
            try:
                survive(agents, 0, random.Random(0))
            finally:
                agents.end()
            same, differ = compare(out, alone)
            good &= not lost and (same if count == 1 else differ < 1e-5)
            row = f"{count:<8}{killed['workers']:>16}{killed['machines']:>17}{lost:>6}{'yes' if same else 'no':>14}"
            print(f"{row}{differ:>15.1e}   in {seconds:.0f} s", flush=True)
    if not good:
        sys.exit("a run was lost, or its result differs from the undisturbed run: see the table")


if __name__ == "__main__":
    main()
