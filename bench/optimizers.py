"""Step time of limner's optimizers compared with torch's, on the tensors of a transformer.

    python bench/optimizers.py --size small

Each optimizer has separate parameters, gradients and state. Optimizers alternate in rounds of a few steps. The output
has median step times, and median ratios to torch's fused AdamW within a round.
"""

from __future__ import annotations

import argparse
import platform
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.benchmark import Timer

from limner.cli.malloc_tuning import restart_with_malloc_tunables
from limner.models.transformer import SIZES
from limner.optim import AdamW16, Beta2WarmupAdamW, Lion, StableAdamW

OptimizerFactory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
BASE = "torch AdamW, fused"


#: The timed optimizers by name.
FACTORIES: dict[str, OptimizerFactory] = {
    BASE: lambda ps: torch.optim.AdamW(ps, fused=True),
    "torch AdamW, foreach": lambda ps: torch.optim.AdamW(ps, foreach=True),
    "StableAdamW": StableAdamW,
    "StableAdamW, 16 bits": lambda ps: StableAdamW(ps, quantize_state=True),
    "AdamW16": AdamW16,
    "Beta2WarmupAdamW": Beta2WarmupAdamW,
    "Lion": Lion,
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
    import optimi  # `gpu/one_candidate.py` imports this file without it

    factories = {**FACTORIES, "optimi StableAdamW": lambda ps: optimi.StableAdamW(ps, lr=1e-3, triton=False)}

    shapes = parameter_shapes(options.size)
    threads, count = torch.get_num_threads(), sum(shape.numel() for shape in shapes)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {options.device}, {threads} threads")
    print(f"{options.size}: {len(shapes)} tensors, {count:,} values, the largest {max(s.numel() for s in shapes):,}\n")
    times = time_steps(factories, shapes, options.device, options.rounds, options.steps)
    for name, samples in times.items():
        ratio = statistics.median(a / b for a, b in zip(samples, times[BASE], strict=True))
        print(f"{name:22} {statistics.median(samples) * 1e3:9.2f} ms per step, {ratio:5.2f} times {BASE}")


def parameter_shapes(size: str) -> list[torch.Size]:
    """Return the shapes of the parameters of a transformer of this size."""
    with torch.device("meta"):
        return [p.shape for p in SIZES[size].build().parameters()]


def time_steps(
    optimizers: dict[str, OptimizerFactory], shapes: list[torch.Size], device: str, rounds: int, steps: int
) -> dict[str, list[float]]:
    """Return the seconds of a step of each optimizer in each round of `steps` steps."""
    timers = {
        name: Timer(
            "step()", globals={"step": optimizer_step(factory, shapes, device)}, num_threads=torch.get_num_threads()
        )
        for name, factory in optimizers.items()
    }
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            times[name].append(timer.timeit(steps).mean)  # after two steps that allocate, compile and warm up
    return times


def optimizer_step(factory: OptimizerFactory, shapes: list[torch.Size], device: str) -> Callable[[], Any]:
    """Return the step of an optimizer on tensors of these shapes with constant gradients."""
    generator = torch.Generator(device).manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(s, generator=generator, device=device)) for s in shapes]
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator, device=device) * 1e-3
    return factory(parameters).step


if __name__ == "__main__":
    main()
