"""Memory of each rank of a sharded prior, measured, beside the plan's estimate.

    python bench/memory_per_rank.py                      # 2 and 4 processes, this size
    python bench/memory_per_rank.py --ranks 4 --replicas 2 --width 256 --depth 8

Processes that talk by gloo train for a few steps as `limner train --parallel sharded` does. Each adds up the storages
of its shards of weights, gradients, moments and averages. Its peak is the most bytes that tensors had in the last step
(`limner.profiling.memory_tracker`): on a CPU the size of a process also holds what torch loads for its first step and
what the allocator keeps, which no plan knows. How much the process grew, from before the model, is printed beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from limner.distributed.sharded import Sharded
from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Bf16
from limner.objectives.autoregressive import Autoregressive
from limner.optim.optimizers import AdamW16Config, AdamWConfig, MuonConfig
from limner.profiling.dry_run import MemoryHook
from limner.profiling.launch import Launch
from limner.profiling.memory_tracker import MemoryTracker
from limner.training.config import TrainConfig
from limner.training.step import update
from limner.training.train_state import Run

OPTIMIZERS = {kind.__name__.removesuffix("Config"): kind for kind in (AdamWConfig, AdamW16Config, MuonConfig)}
STEPS = 3


def main() -> None:
    """Start the processes of each number of ranks and print what they measured beside the plan."""
    parser = argparse.ArgumentParser(description="memory of each rank against the plan")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--grid", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=2_048)
    parser.add_argument("--samples", type=int, default=2, help="per rank and step")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="AdamW16")
    parser.add_argument("--checkpointed", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        print(json.dumps(work(planned(options, options.ranks[0]), options.rank, options.meeting)))
        return
    for ranks in options.ranks:
        launch = planned(options, ranks)
        found = start(ranks)
        print(f"{ranks} ranks, {launch.shards} shards x {launch.replicas}; MB")
        print(f"  {'':28} {'planned':>10} {'measured, by rank':>20}")
        expected = {**launch.state, "activations": sum(launch.activations.values()), "peak": launch.peak}
        for name, value in expected.items():
            measured = [rank[name] for rank in found]
            off = max((m - value for m in measured), key=abs) / value
            print(f"  {name:28} {value / 1e6:10.2f} {' '.join(f'{m / 1e6:8.2f}' for m in measured)} {off:+8.1%}")
        grown = " ".join(f"{rank['grown'] / 1e6:8.2f}" for rank in found)
        print(f"  {'the process grew by':39} {grown}")


def planned(options: argparse.Namespace, ranks: int) -> Launch:
    """What the options describe, on so many ranks."""
    config = TransformerConfig(
        text_vocab=options.vocab, image_vocab=options.vocab, text_len=32, grid=(options.grid, options.grid),
        width=options.width, depth=options.depth, heads=max(1, options.width // 64),
    )  # fmt: skip
    training = TrainConfig(
        steps=STEPS, batch_size=options.samples * ranks, accumulate=options.accumulate, ema_decay=0.9,
        optimizer=OPTIMIZERS[options.optimizer](), checkpoint_activations=options.checkpointed, precision=Bf16(),
    )  # fmt: skip
    return Launch(config=config, training=training, gpus=ranks, replicas=options.replicas, device="cpu")


def start(ranks: int) -> list[dict[str, Any]]:
    """This file as so many processes; what each has measured."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--meeting", str(Path(folder) / "meeting"), "--ranks"]
        started = [
            subprocess.Popen([*command, str(ranks), "--rank", str(rank)], env=environment, stdout=subprocess.PIPE)
            for rank in range(ranks)
        ]
        try:
            said = [process.communicate()[0] for process in started]
        finally:
            for process in started:
                process.kill()
    if any(process.returncode for process in started):
        raise SystemExit("a process has failed")
    return [json.loads(text.splitlines()[-1]) for text in said]


def work(launch: Launch, rank: int, meeting: str) -> dict[str, Any]:
    """Train as a rank of the launch; bytes."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=launch.gpus, timeout=timedelta(minutes=2)
    )
    gathered = launch.gathered[1]
    try:
        torch.manual_seed(0)
        with MemoryTracker() as watch:
            before = resident()
            parallel = Sharded(launch.replicas)
            with parallel.building():
                model = launch.config.build()
            run = Run(model, Autoregressive(), launch.training, "cpu", parallel)
            measure = MemoryHook(watch, gathered)
            run.compute.register_forward_hook(measure.after_forward)
            for _ in range(STEPS):
                measure.restart()
                update(run, batch(launch), [measure])
            grown = resident() - before
            return {**measure.state, "activations": measure.activations, "peak": watch.peak, "grown": grown}
    finally:
        distributed.destroy_process_group()


def batch(launch: Launch) -> dict[str, torch.Tensor]:
    """Random tokens without padding."""
    c, rows = launch.config, launch.training.batch_size // launch.gpus
    return {
        "text": torch.randint(0, c.text_vocab, (rows, c.text_len)),
        "image": torch.randint(0, c.image_vocab, (rows, c.grid[0] * c.grid[1])),
    }


def resident() -> int:
    """The most memory that the process has had, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


if __name__ == "__main__":
    main()
