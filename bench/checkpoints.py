"""Time that training waits for a checkpoint of a model sharded over processes.

    torchrun --nproc-per-node 2 bench/checkpoints.py --size small --folder DISK

    gathered    all processes gather every tensor; the first one writes the files while all wait
    shards      each process copies its shards and continues (`distributed/sharded_checkpoint.py`)

The state is weights, their average and AdamW's moments, in fp32. The two methods alternate. The output has medians over
rounds of the slowest process: the wait, the time until the checkpoint has its final name on disk, and the time of a
training step, alone and while shards are written.
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

from limner.distributed.process_group import join_process_group
from limner.distributed.sharded import Sharded
from limner.models.transformer import SIZES
from limner.optim.dtensor import full_tensor
from limner.training.checkpoint import Checkpointer

Tensors = dict[str, dict[str, Tensor]]


def main() -> None:
    """Time both methods in all processes; the first process prints."""
    parser = argparse.ArgumentParser(description="time that training waits for a checkpoint")
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--folder", type=Path, help="on the measured disk; a temporary folder by default")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with join_process_group("fsdp") as parallel, tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        assert isinstance(parallel, Sharded)
        measure(parallel, options.size, options.rounds, Path(broadcast(temporary)))


def broadcast(text: str) -> str:
    """Return the text of the first process."""
    texts = [text]
    distributed.broadcast_object_list(texts)
    return texts[0] or ""


def measure(parallel: Sharded, size: str, rounds: int, folder: Path) -> None:
    """Time a checkpoint after a step with both methods alternately; the first process prints medians."""
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

    step()  # allocates the moments
    state = {"model": {name: p.detach() for name, p in model.named_parameters()}, "ema": average, "optimizer": {}}
    names = {p: name for name, p in model.named_parameters()}
    for p, entries in optimizer.state.items():
        state["optimizer"] |= {f"{key}.{names[p]}": value for key, value in entries.items()}
    size_in_mb = sum(x.numel() * x.element_size() for group in state.values() for x in group.values()) / 1e6

    files, shards = (
        Checkpointer(folder / "gathered", 1),
        parallel.checkpointer(Checkpointer(folder / "shards", 1)),
    )
    shards.acquire()
    samples: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        times = {"a step": timed(step)}
        times["gathered: training waits"] = timed(lambda at=turn: gathered(files, at, state))
        start = time.perf_counter()
        times["shards: training waits"] = timed(lambda at=turn: shards.save(at, state, {}))
        times["a step while shards are written"] = timed(step)
        shards.flush()
        times["shards: on the disk after"] = time.perf_counter() - start
        for name, seconds in times.items():
            slowest = torch.tensor(seconds, device=parallel.device)
            distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
            if turn:  # the first turn allocates the buffers
                samples.setdefault(name, []).append(slowest.item())
    if parallel.is_main:
        count = sum(p.numel() for p in model.parameters())
        print(f"Python {platform.python_version()}, torch {torch.__version__}, {parallel.world_size} processes")
        print(f"{size}: {count:,} parameters, {size_in_mb:,.0f} MB of state\n")
        for name, seconds in samples.items():
            print(f"{name:34} {statistics.median(seconds) * 1e3:10,.0f} ms")
        waits = zip(samples["gathered: training waits"], samples["shards: training waits"], strict=True)
        print(f"{'gathered over shards, waiting':34} {statistics.median(a / b for a, b in waits):10.1f} times")


def gathered(files: Checkpointer, step: int, state: Tensors) -> None:
    """Gather the state on all processes and write it in the first one."""
    tensors = {name: {key: full_tensor(x) for key, x in group.items()} for name, group in state.items()}
    if distributed.get_rank() == 0:
        files.save(step, tensors, {})


def timed(function: Callable[[], object]) -> float:
    """Return the seconds of this process from a common start."""
    distributed.barrier()
    start = time.perf_counter()
    function()
    seconds = time.perf_counter() - start
    distributed.barrier()
    return seconds


if __name__ == "__main__":
    main()
