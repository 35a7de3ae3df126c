"""Step time of limner's optimizers compared with torch's, on the tensors of a transformer.

    python bench/optimizers.py --size small

Each optimizer has separate parameters, gradients and state. Optimizers alternate in rounds of a few steps. The output
has median step times, and median ratios to torch's fused AdamW within a round.
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

from limner.cli.malloc_tuning import restart_with_malloc_tunables
from limner.models.transformer import SIZES
from limner.optim import AdamW16, Beta2WarmupAdamW, Lion, StableAdamW

OptimizerFactory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
BASE = "torch AdamW, fused"


def factories() -> dict[str, OptimizerFactory]:
    """Return the timed optimizers by name."""
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
    """Time the steps of all optimizers alternately, and print medians and ratios."""
    parser = argparse.ArgumentParser(description="step time of optimizers")
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="steps of each optimizer in a round")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    restart_with_malloc_tunables()

    with torch.device("meta"):
        shapes = [p.shape for p in SIZES[options.size].build().parameters()]
    threads, count = torch.get_num_threads(), sum(shape.numel() for shape in shapes)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {options.device}, {threads} threads")
    print(f"{options.size}: {len(shapes)} tensors, {count:,} values, the largest {max(s.numel() for s in shapes):,}\n")
    times: dict[str, list[float]] = {}
    steps = {name: _step(factory, shapes, options.device) for name, factory in factories().items()}
    for turn in range(options.rounds + 1):
        for name, step in steps.items():
            _synchronize(options.device)
            start = time.perf_counter()
            for _ in range(options.steps):
                step()
            _synchronize(options.device)
            if turn:  # the first turn allocates the state, compiles and warms up
                times.setdefault(name, []).append((time.perf_counter() - start) / options.steps)
    for name, samples in times.items():
        ratio = statistics.median(a / b for a, b in zip(samples, times[BASE], strict=True))
        print(f"{name:22} {statistics.median(samples) * 1e3:9.2f} ms per step, {ratio:5.2f} times {BASE}")


def _step(factory: OptimizerFactory, shapes: list[torch.Size], device: str) -> Callable[[], Any]:
    """Return the step of an optimizer on tensors of these shapes with constant gradients."""
    generator = torch.Generator(device).manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(s, generator=generator, device=device)) for s in shapes]
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator, device=device) * 1e-3
    return factory(parameters).step


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
