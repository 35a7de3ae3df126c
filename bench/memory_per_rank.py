"""Measured memory of each rank of a sharded prior, compared with the plan.

    python bench/memory_per_rank.py                      # 2 and 4 processes, this size
    python bench/memory_per_rank.py --ranks 4 --replicas 2 --width 256 --depth 8

Gloo processes train for a few steps as `limner train --parallel fsdp` does. Each adds up the storages of its shards
of weights, gradients, moments and averages. Its peak is the maximum of live tensor bytes in the last step
(`limner.planner.memory_tracker`). The process size also has what torch loads for its first step and the allocator's
cache, which the plan does not cover. The output has the growth of the process, from before the model, as well.
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
from limner.planner.dry_run import MemoryHook
from limner.planner.launch import Launch
from limner.planner.memory_tracker import MemoryTracker
from limner.training.config import TrainConfig
from limner.training.step import update
from limner.training.train_state import TrainState

OPTIMIZERS = {kind.__name__.removesuffix("Config"): kind for kind in (AdamWConfig, AdamW16Config, MuonConfig)}
STEPS = 3


def main() -> None:
    """Start the processes for each number of ranks, and print measurements and plan."""
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
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        print(json.dumps(work(planned(options, options.ranks[0]), options.rank, options.rendezvous)))
        return
    for ranks in options.ranks:
        launch = planned(options, ranks)
        results = start(__file__, ranks, "--ranks", str(ranks))
        print(f"{ranks} ranks, {launch.shards} shards x {launch.replicas}; MB")
        print(f"  {'':28} {'planned':>10} {'measured, by rank':>20}")
        for name, value in launch.sizes.items():
            measured = [rank[name] for rank in results]
            error = max((m - value for m in measured), key=abs) / value
            print(f"  {name:28} {value / 1e6:10.2f} {' '.join(f'{m / 1e6:8.2f}' for m in measured)} {error:+8.1%}")
        growth = " ".join(f"{rank['growth'] / 1e6:8.2f}" for rank in results)
        print(f"  {'growth of the process':39} {growth}")


def planned(options: argparse.Namespace, ranks: int) -> Launch:
    """Return the launch that the options describe, on a number of ranks."""
    config = TransformerConfig(
        text_vocab=options.vocab, image_vocab=options.vocab, text_len=32, grid=(options.grid, options.grid),
        width=options.width, depth=options.depth, heads=max(1, options.width // 64),
    )  # fmt: skip
    training = TrainConfig(
        steps=STEPS, batch_size=options.samples * ranks, accumulate=options.accumulate, ema_decay=0.9,
        optimizer=OPTIMIZERS[options.optimizer](), checkpoint_activations=options.checkpointed, precision=Bf16(),
    )  # fmt: skip
    return Launch(config=config, training=training, gpus=ranks, replicas=options.replicas, device="cpu")


def start(script: str, ranks: int, *arguments: str) -> list[dict[str, Any]]:
    """Run a script as one process per rank, with the options of this process and more arguments. Return the JSON that
    each prints last."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, script, *sys.argv[1:], "--rendezvous", str(Path(folder) / "rendezvous"), *arguments]
        started = [
            subprocess.Popen([*command, "--rank", str(rank)], env=environment, stdout=subprocess.PIPE)
            for rank in range(ranks)
        ]
        try:
            outputs = [process.communicate()[0] for process in started]
        finally:
            for process in started:
                process.kill()
    if any(process.returncode for process in started):
        raise SystemExit("a process failed: see its error above")
    return [json.loads(text.splitlines()[-1]) for text in outputs]


def work(launch: Launch, rank: int, rendezvous: str) -> dict[str, Any]:
    """Train as a rank of the launch, and return its measurements in bytes."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=launch.gpus, timeout=timedelta(minutes=2)
    )
    gathered = launch.gathered_bytes[1]
    try:
        torch.manual_seed(0)
        with MemoryTracker() as tracker:
            before = resident()
            parallel = Sharded(launch.replicas)
            with parallel.init_context():
                model = launch.config.build()
            run = TrainState(model, Autoregressive(), launch.training, "cpu", parallel)
            hook = MemoryHook(tracker, gathered)
            run.wrapped.register_forward_hook(hook.after_forward)
            for _ in range(STEPS):
                update(run, batch(launch), [hook])
            growth = resident() - before
            return {**hook.sizes, "growth": growth}
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
    """Return the peak resident memory of the process in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


if __name__ == "__main__":
    main()
