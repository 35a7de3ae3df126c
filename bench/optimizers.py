"""A step of our optimisers beside those of torch, on the tensors of a transformer.

    python bench/optimizers.py --size small

Each side has parameters, gradients and state of its own and takes a few steps in turn, round after round. Printed are
medians of a step, and medians of the ratios to torch's fused AdamW within each round.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import optimi
import torch

from limner.cli.malloc_tuning import settle_allocator
from limner.models.transformer import SIZES
from limner.optim import AdamW16, Beta2WarmupAdamW, Lion, StableAdamW

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
BASE = "torch AdamW, fused"


def sides() -> dict[str, Make]:
    """What is timed, by name."""
    return {
        BASE: lambda ps: torch.optim.AdamW(ps, fused=True),
        "torch AdamW, foreach": lambda ps: torch.optim.AdamW(ps, foreach=True),
        "StableAdamW": StableAdamW,
        "StableAdamW, 16 bits": lambda ps: StableAdamW(ps, quantize_state=True),
        "AdamW16": AdamW16,
        "Beta2WarmupAdamW": Beta2WarmupAdamW,
        "Lion": Lion,
        "optimi StableAdamW": lambda ps: optimi.StableAdamW(ps, lr=1e-3, triton=False),
    }


def main() -> None:
    """Time the steps of all sides in turn and print medians and ratios."""
    parser = argparse.ArgumentParser(description="time of an optimiser's step")
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="of each side, in a round")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    settle_allocator()

    with torch.device("meta"):
        shapes = [p.shape for p in SIZES[options.size].build().parameters()]
    threads, count = torch.get_num_threads(), sum(shape.numel() for shape in shapes)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {options.device}, {threads} threads")
    print(f"{options.size}: {len(shapes)} tensors, {count:,} values, the largest {max(s.numel() for s in shapes):,}\n")
    times: dict[str, list[float]] = {}
    made = {name: _stepping(make, shapes, options.device) for name, make in sides().items()}
    for turn in range(options.rounds + 1):
        for name, step in made.items():
            _settle(options.device)
            began = time.perf_counter()
            for _ in range(options.steps):
                step()
            _settle(options.device)
            if turn:  # the first turn makes the state, compiles and warms up
                times.setdefault(name, []).append((time.perf_counter() - began) / options.steps)
    for name, found in times.items():
        ratio = statistics.median(a / b for a, b in zip(found, times[BASE], strict=True))
        print(f"{name:22} {statistics.median(found) * 1e3:9.2f} ms per step, {ratio:5.2f} times {BASE}")


def _stepping(make: Make, shapes: list[torch.Size], device: str) -> Callable[[], Any]:
    """The step of an optimiser over tensors of these shapes, whose gradients stay the same."""
    generator = torch.Generator(device).manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(s, generator=generator, device=device)) for s in shapes]
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator, device=device) * 1e-3
    return make(parameters).step


def _settle(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
