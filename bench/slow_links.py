"""Training steps of two replicas over a slow link, with and without gradient compression. Needs root, on Linux.

    sudo python bench/slow_links.py --mbit 50 200

Each replica is a process in its own network namespace, like a separate machine. A veth pair connects the two, and
`tc tbf` limits the rate of each end. Every reduction method takes the same steps of the same prior on the same batches,
on each link, `--rounds` times. The output per step:

    seconds     median over a round's steps
    sent        bytes that left one end of the link, with headers
    hidden      share of the transmission time (bytes over the link's rate) that overlaps computation: the part by which
                the step is not longer than on an unlimited link
    loss        after all steps

`fsdp` sends most: it gathers weights twice and reduces gradients; `zero2` gathers weights once. Both are meant for
links within a machine.

`limner reproduce compression-rank` measures the rank that does not change the loss.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from limner import errors
from limner.distributed.gradient_reducers import Bf16Reducer, Fp32Reducer
from limner.distributed.powersgd import PowerSGD, PowerSGDConfig
from limner.distributed.replicated import Replicated
from limner.distributed.sharded import Sharded, Zero2
from limner.distributed.torch_powersgd import TorchPowerSGD
from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Fp32
from limner.objectives.autoregressive import Autoregressive
from limner.optim.optimizers import AdamWConfig
from limner.progress import progress
from limner.training.config import TrainConfig
from limner.training.parallel import Parallel, SingleProcess
from limner.training.step import update
from limner.training.train_state import TrainState

ENDS = ("limner0", "limner1")  # namespaces and interfaces
ALONE = "alone, nothing sent"
BASE = "DDP, fp32"
KINDS = (ALONE, BASE, "torch-powersgd", "plain", "bf16", "powersgd, fp32", "powersgd", "fsdp", "zero2")


@dataclass
class Work:
    """Work of a process: `steps` timed steps after `warm` untimed ones."""

    kind: str
    width: int
    depth: int
    batch: int
    rank: int
    warm: int
    steps: int
    seed: int = 0


def main() -> None:
    """Measure every reduction method on every link, and print the table."""
    parser = argparse.ArgumentParser(description="training over slow links")
    parser.add_argument("--mbit", type=float, nargs="+", default=[50.0, 200.0])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--batch", type=int, default=8, help="samples of both replicas together")
    parser.add_argument("--rank", type=int, default=32, help="rank of PowerSGD")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1, help="repetitions; the output has medians and ranges")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(Work(**json.loads(options.work)))
        return
    if os.geteuid() != 0:
        sys.exit("network namespaces need root: run with sudo")
    print(f"torch {torch.__version__}; width {options.width}, {options.depth} layers, rank {options.rank}")
    links: tuple[float | None, ...] = (None, *options.mbit)
    results: dict[tuple[str, float | None], list[dict[str, Any]]] = {}
    with linked(), progress("measuring", options.rounds * len(links) * len(options.kinds), unit="run") as bar:
        for _ in range(options.rounds):
            for kind in options.kinds:
                for mbit in links:  # links innermost: the speed of a machine drifts
                    limit(mbit)
                    task = Work(kind, options.width, options.depth, options.batch, options.rank, 2, options.steps)
                    results.setdefault((kind, mbit), []).append(run_both(task))
                    bar.advance()
    for mbit in links:
        title = f"{mbit:g} Mbit/s" if mbit else "no limit"
        print(f"\n{title:24}{'seconds':>22}{'sent':>10}{'hidden':>22}{'loss':>8}  times as fast as {BASE}")
        for kind in options.kinds:
            print(_row(kind, mbit, results))


def _row(kind: str, mbit: float | None, results: dict[tuple[str, float | None], list[dict[str, Any]]]) -> str:
    """Format the medians over rounds, with ranges."""
    rounds = results[kind, mbit]
    seconds, sent = [r["seconds"] for r in rounds], statistics.median(r["sent"] for r in rounds)
    hidden = "–"
    if mbit and sent > 1e5:
        wire = sent * 8 / (mbit * 1e6)
        shares = [1 - (a["seconds"] - b["seconds"]) / wire for a, b in zip(rounds, results[kind, None], strict=True)]
        hidden = _spread(shares, "{:.0%}")
    row = f"{kind:24}{_spread(seconds, '{:.3f}'):>22}{sent / 1e6:>7.2f} MB{hidden:>22}{rounds[0]['loss']:8.4f}"
    if base := results.get((BASE, mbit)):
        faster = [a["seconds"] / b for a, b in zip(base, seconds, strict=True)]
        row += f"  {_spread(faster, '{:.2f}')}"
    return row


def _spread(values: list[float], style: str) -> str:
    """Format a median with its range."""
    ends = f" ({style.format(min(values))}..{style.format(max(values))})" if len(values) > 1 else ""
    return style.format(statistics.median(values)) + ends


@contextlib.contextmanager
def linked() -> Iterator[None]:
    """Create two namespaces connected by a veth pair."""
    for name in ENDS:
        _run(f"ip netns add {name}")
    try:
        _run(f"ip link add {ENDS[0]} netns {ENDS[0]} type veth peer name {ENDS[1]} netns {ENDS[1]}")
        for i, name in enumerate(ENDS):
            _run(f"ip -n {name} address add 10.77.0.{i + 1}/24 dev {name}")
            _run(f"ip -n {name} link set {name} up")
            _run(f"ip -n {name} link set lo up")
        yield
    finally:
        for name in ENDS:
            _run(f"ip netns delete {name}")


def limit(mbit: float | None) -> None:
    """Limit the rate of each end of the link, or remove the limit with None.

    The queue has 256 kB, as in a switch: behind megabytes of data, acknowledgments are so late that the sender pauses.
    """
    discipline = f"tbf rate {mbit}mbit burst 128kb limit 256kb" if mbit else "noqueue"
    for name in ENDS:
        _run(f"tc -n {name} qdisc replace dev {name} root {discipline}")


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)


def run_both(task: Work) -> dict[str, Any]:
    """Run both processes and return the measurements of the first."""
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank, name in enumerate(ENDS):
            env = {
                **os.environ, "PYTHONPATH": str(Path(errors.__file__).parents[1]), "OMP_NUM_THREADS": "1",
                "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29577",
                "GLOO_SOCKET_IFNAME": name, "OUT": f"{folder}/{rank}.json",
            }  # fmt: skip
            command = ["ip", "netns", "exec", name, sys.executable, __file__, "--work", json.dumps(asdict(task))]
            processes.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
        for process in processes:
            _, err = process.communicate()
            if process.returncode:
                sys.exit(err)
        return json.loads(Path(folder, "0.json").read_text())


def strategy(task: Work) -> Parallel:
    """Return the reduction method."""
    if task.kind == ALONE:
        return SingleProcess()
    if task.kind in ("fsdp", "zero2"):
        return Sharded() if task.kind == "fsdp" else Zero2()
    config = partial(PowerSGDConfig, rank=task.rank)
    return Replicated(
        {
            BASE: None, "plain": Fp32Reducer, "bf16": Bf16Reducer, "powersgd": partial(PowerSGD, config()),
            "powersgd, fp32": partial(PowerSGD, config(quantize=False)),
            "torch-powersgd": partial(TorchPowerSGD, task.rank),
        }[task.kind]
    )  # fmt: skip


def work(task: Work) -> None:
    """Train as one of the two processes and write the measurements."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    parallel = strategy(task)
    model = TransformerConfig(
        text_vocab=512, image_vocab=512, text_len=32, grid=(12, 12), width=task.width, depth=task.depth,
        heads=task.width // 64,
    )  # fmt: skip
    steps = task.warm + task.steps
    config = TrainConfig(
        steps=steps, optimizer=AdamWConfig(lr=1e-3), batch_size=task.batch, precision=Fp32(), seed=task.seed
    )
    torch.manual_seed(task.seed)
    run = TrainState(model.build(), Autoregressive(), config, parallel=parallel)
    generator = torch.Generator().manual_seed(task.seed)
    times, sent = [], 0
    for step in range(steps):
        text = torch.randint(0, 512, (task.batch, 32), generator=generator)
        image = torch.randint(0, 512, (task.batch, 144), generator=generator)
        share = {"text": text.chunk(2)[rank], "image": image.chunk(2)[rank]}
        distributed.barrier()
        before, start = _sent(rank), time.perf_counter()
        update(run, share)
        times.append(time.perf_counter() - start)
        sent += _sent(rank) - before if step >= task.warm else 0
    result = {"seconds": statistics.median(times[task.warm :]), "sent": sent / task.steps, "loss": run.loss}
    Path(os.environ["OUT"]).write_text(json.dumps(result))
    distributed.barrier()
    distributed.destroy_process_group()


def _sent(rank: int) -> int:
    return int(Path(f"/sys/class/net/{ENDS[rank]}/statistics/tx_bytes").read_text())


if __name__ == "__main__":
    main()
