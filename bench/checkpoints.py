"""How long training waits for a checkpoint, of a model whose weights processes share.

    torchrun --nproc-per-node 2 bench/checkpoints.py --size small --folder DISK

    gathered    every tensor is made whole on all processes, and the first one writes the files while all wait
    shards      each process copies its shards and goes on (`distributed/sharded_checkpoint.py`)

A state is weights, their average and AdamW's moments, in fp32. The two sides take turns. Printed are medians over the
rounds, of the slowest process each: how long it waits, how long until the checkpoint has its name on the disk, and how
long a training step takes, alone and while shards are being written.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, distributed

from limner.distributed.process_group import joined
from limner.distributed.sharded import Sharded
from limner.models.transformer import SIZES
from limner.optim.dtensor import full_tensor
from limner.training.checkpoint import Files

Tensors = dict[str, dict[str, Tensor]]


def main() -> None:
    """Time both sides in each of the processes; the first one prints."""
    parser = argparse.ArgumentParser(description="how long training waits for a checkpoint")
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; a temporary one by default")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with joined("sharded") as parallel, tempfile.TemporaryDirectory(dir=options.folder) as own:
        assert isinstance(parallel, Sharded)
        measure(parallel, options.size, options.rounds, Path(shared(own)))


def shared(text: str) -> str:
    """What the first process says."""
    said = [text]
    distributed.broadcast_object_list(said)
    return said[0] or ""


def measure(parallel: Sharded, size: str, rounds: int, folder: Path) -> None:
    """Time a checkpoint of a model of that size after a step, both sides in turn; the first process prints medians."""
    torch.manual_seed(0)
    config = SIZES[size]
    model = config.build()
    parallel.prepare(model, parallel.device, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    text = torch.randint(0, config.text_vocab, (1, config.text_len), device=parallel.device)
    image = torch.randint(0, config.image_vocab, (1, math.prod(config.grid)), device=parallel.device)

    def step() -> None:
        sum(logits.square().mean() for logits in model(text, image)).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()

    step()  # which makes the moments
    state = {"model": {name: p.detach() for name, p in model.named_parameters()}, "ema": average, "optimizer": {}}
    names = {p: name for name, p in model.named_parameters()}
    for p, entries in optimizer.state.items():
        state["optimizer"] |= {f"{key}.{names[p]}": value for key, value in entries.items()}
    size_in_mb = sum(x.numel() * x.element_size() for group in state.values() for x in group.values()) / 1e6

    files, shards = Files(folder / "gathered", 1), parallel.checkpointer(Files(folder / "shards", 1))
    shards.begin()
    found: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        times = {"a step": timed(step)}
        times["gathered: training waits"] = timed(lambda at=turn: gathered(files, at, state))
        begun = time.perf_counter()
        times["shards: training waits"] = timed(lambda at=turn: shards.save(at, state, {}))
        times["a step while shards are written"] = timed(step)
        shards.wait()
        times["shards: on the disk after"] = time.perf_counter() - begun
        for name, seconds in times.items():
            slowest = torch.tensor(seconds, device=parallel.device)
            distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
            if turn:  # the first turn makes the buffers
                found.setdefault(name, []).append(slowest.item())
    if parallel.is_main:
        count = sum(p.numel() for p in model.parameters())
        print(f"Python {platform.python_version()}, torch {torch.__version__}, {parallel.world} processes")
        print(f"{size}: {count:,} parameters, {size_in_mb:,.0f} MB of state\n")
        for name, seconds in found.items():
            print(f"{name:34} {statistics.median(seconds) * 1e3:10,.0f} ms")
        waits = zip(found["gathered: training waits"], found["shards: training waits"], strict=True)
        print(f"{'gathered over shards, waiting':34} {statistics.median(a / b for a, b in waits):10.1f} times")


def gathered(files: Files, step: int, state: Tensors) -> None:
    """The whole state on all processes; the first one writes."""
    tensors = {name: {key: full_tensor(x) for key, x in group.items()} for name, group in state.items()}
    if distributed.get_rank() == 0:
        files.save(step, tensors, {})


def timed(do: Callable[[], object]) -> float:
    """Seconds of this process, from a common start."""
    distributed.barrier()
    begun = time.perf_counter()
    do()
    own = time.perf_counter() - begun
    distributed.barrier()
    return own


if __name__ == "__main__":
    main()
