"""Training steps of two replicas that a slow link joins: compressed gradients beside others. Needs root, on Linux.

    sudo python bench/slow_links.py --mbit 50 200

Each replica is a process in a network namespace of its own, a machine as far as its sockets know. A veth pair joins the
two, and `tc tbf` limits what each end sends. Every way of averaging gradients takes the same steps of the same prior
on the same batches, on each link in turn, `--rounds` times. Printed are, for a step:

    seconds     the median of a round's steps
    sent        bytes that really left one end of the link, headers included
    hidden      the share of the time on the wire (bytes over the link's rate) that does not make the step longer than
                it is on a link without limit
    loss        after all steps

`sharded` sends most: weights to compute with, twice, and gradients; `zero2` gathers them once. Both are for links
within a machine.

`limner reproduce compression-rank` asks which rank leaves the loss as it is.
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
from limner.distributed.gradient_reducers import Bf16Reducer, Plain
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
from limner.training.parallel import Parallel, Single
from limner.training.step import update
from limner.training.train_state import Run

ENDS = ("limner0", "limner1")  # namespaces, and the ends of the link in them
ALONE = "alone, nothing sent"
BASE = "DDP, fp32"
KINDS = (ALONE, BASE, "torch-powersgd", "plain", "bf16", "powersgd, fp32", "powersgd", "sharded", "zero2")


@dataclass
class Work:
    """What a process does: `steps` timed steps after `warm` others."""

    kind: str
    width: int
    depth: int
    batch: int
    rank: int
    warm: int
    steps: int
    seed: int = 0


def main() -> None:
    """Join two machines by each link in turn, and print what each way of averaging took."""
    parser = argparse.ArgumentParser(description="training over slow links")
    parser.add_argument("--mbit", type=float, nargs="+", default=[50.0, 200.0])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--batch", type=int, default=8, help="of both replicas")
    parser.add_argument("--rank", type=int, default=32, help="of PowerSGD's factors")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1, help="of all that is measured, with medians and ranges")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(Work(**json.loads(options.work)))
        return
    if os.geteuid() != 0:
        sys.exit("network namespaces need root")
    print(f"torch {torch.__version__}; width {options.width}, {options.depth} layers, rank {options.rank}")
    links: tuple[float | None, ...] = (None, *options.mbit)
    found: dict[tuple[str, float | None], list[dict[str, Any]]] = {}
    with linked(), progress("measuring", options.rounds * len(links) * len(options.kinds), unit="run") as bar:
        for _ in range(options.rounds):
            for kind in options.kinds:
                for mbit in links:  # one after the other: machines get faster and slower by the hour
                    limit(mbit)
                    of = Work(kind, options.width, options.depth, options.batch, options.rank, 2, options.steps)
                    found.setdefault((kind, mbit), []).append(both(of))
                    bar.advance()
    for mbit in links:
        title = f"{mbit:g} Mbit/s" if mbit else "no limit"
        print(f"\n{title:24}{'seconds':>22}{'sent':>10}{'hidden':>22}{'loss':>8}  times as fast as {BASE}")
        for kind in options.kinds:
            print(_row(kind, mbit, found))


def _row(kind: str, mbit: float | None, found: dict[tuple[str, float | None], list[dict[str, Any]]]) -> str:
    """Medians of the rounds, the lowest and the highest behind them."""
    rounds = found[kind, mbit]
    seconds, sent = [one["seconds"] for one in rounds], statistics.median(one["sent"] for one in rounds)
    hidden = "–"
    if mbit and sent > 1e5:
        wire = sent * 8 / (mbit * 1e6)
        shares = [1 - (a["seconds"] - b["seconds"]) / wire for a, b in zip(rounds, found[kind, None], strict=True)]
        hidden = _spread(shares, "{:.0%}")
    row = f"{kind:24}{_spread(seconds, '{:.3f}'):>22}{sent / 1e6:>7.2f} MB{hidden:>22}{rounds[0]['loss']:8.4f}"
    if base := found.get((BASE, mbit)):
        faster = [a["seconds"] / b for a, b in zip(base, seconds, strict=True)]
        row += f"  {_spread(faster, '{:.2f}')}"
    return row


def _spread(values: list[float], style: str) -> str:
    """A median, and from where to where."""
    ends = f" ({style.format(min(values))}..{style.format(max(values))})" if len(values) > 1 else ""
    return style.format(statistics.median(values)) + ends


@contextlib.contextmanager
def linked() -> Iterator[None]:
    """Two namespaces, joined."""
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
    """What each end of the link sends at most; None is no limit. As in a switch, 256 kB wait their turn at most: with
    megabytes, acknowledgements wait behind data for a third of a second, and the other end pauses."""
    discipline = f"tbf rate {mbit}mbit burst 128kb limit 256kb" if mbit else "noqueue"
    for name in ENDS:
        _run(f"tc -n {name} qdisc replace dev {name} root {discipline}")


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)


def both(of: Work) -> dict[str, Any]:
    """What the first of the two processes measures."""
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank, name in enumerate(ENDS):
            env = {
                **os.environ, "PYTHONPATH": str(Path(errors.__file__).parents[1]), "OMP_NUM_THREADS": "1",
                "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29577",
                "GLOO_SOCKET_IFNAME": name, "OUT": f"{folder}/{rank}.json",
            }  # fmt: skip
            command = ["ip", "netns", "exec", name, sys.executable, __file__, "--work", json.dumps(asdict(of))]
            processes.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
        for process in processes:
            _, err = process.communicate()
            if process.returncode:
                sys.exit(err)
        return json.loads(Path(folder, "0.json").read_text())


def strategy(of: Work) -> Parallel:
    """The way of averaging gradients."""
    if of.kind == ALONE:
        return Single()
    if of.kind in ("sharded", "zero2"):
        return Sharded() if of.kind == "sharded" else Zero2()
    config = partial(PowerSGDConfig, rank=of.rank)
    return Replicated(
        {
            BASE: None, "plain": Plain, "bf16": Bf16Reducer, "powersgd": partial(PowerSGD, config()),
            "powersgd, fp32": partial(PowerSGD, config(narrow=False)),
            "torch-powersgd": partial(TorchPowerSGD, of.rank),
        }[of.kind]
    )  # fmt: skip


def work(of: Work) -> None:
    """One process."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    parallel = strategy(of)
    model = TransformerConfig(
        text_vocab=512, image_vocab=512, text_len=32, grid=(12, 12), width=of.width, depth=of.depth,
        heads=of.width // 64,
    )  # fmt: skip
    steps = of.warm + of.steps
    config = TrainConfig(
        steps=steps, optimizer=AdamWConfig(lr=1e-3), batch_size=of.batch, precision=Fp32(), seed=of.seed
    )
    torch.manual_seed(of.seed)
    run = Run(model.build(), Autoregressive(), config, parallel=parallel)
    generator = torch.Generator().manual_seed(of.seed)
    times, sent = [], 0
    for step in range(steps):
        text = torch.randint(0, 512, (of.batch, 32), generator=generator)
        image = torch.randint(0, 512, (of.batch, 144), generator=generator)
        share = {"text": text.chunk(2)[rank], "image": image.chunk(2)[rank]}
        distributed.barrier()
        before, began = _sent(rank), time.perf_counter()
        update(run, share)
        times.append(time.perf_counter() - began)
        sent += _sent(rank) - before if step >= of.warm else 0
    found = {"seconds": statistics.median(times[of.warm :]), "sent": sent / of.steps, "loss": run.loss}
    Path(os.environ["OUT"]).write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


def _sent(rank: int) -> int:
    return int(Path(f"/sys/class/net/{ENDS[rank]}/statistics/tx_bytes").read_text())


if __name__ == "__main__":
    main()
