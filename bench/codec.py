"""Packing and unpacking rates of the 16-bit formats, in values per second.

    python bench/codec.py

Times 1-6-9 and 0-6-10 on tensors of normal numbers spread over the formats' range, alternating with torch's conversion
to fp16 and back, which is a single instruction. Prints medians over rounds.
"""

from __future__ import annotations

import argparse
import platform
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from limner.cli.malloc_tuning import restart_with_malloc_tunables
from limner.numerics.formats import E6M9, UE6M10, FloatFormat


def operations(size: int) -> dict[str, Callable[[], Tensor]]:
    """Return the timed operations by name."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, generator=generator) * torch.exp2(-30 * torch.rand(size, generator=generator))

    def codec(f: FloatFormat) -> dict[str, Callable[[], Tensor]]:
        codes = f.pack(x)
        noise = torch.Generator().manual_seed(0)
        return {
            f"pack {f}": lambda: f.pack(x, out=codes),
            f"pack {f}, stochastic": lambda: f.pack(x, noise, out=codes),
            f"unpack {f}": lambda: f.unpack(codes),
        }

    half = x.half()
    return codec(E6M9) | codec(UE6M10) | {"to fp16": x.half, "from fp16": half.float}


def main() -> None:
    """Time all operations at each size and print the rates."""
    parser = argparse.ArgumentParser(description="values per second packed and unpacked")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1 << 16, 1 << 24])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    restart_with_malloc_tunables()  # as in `limner train`; otherwise allocation dominates
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    for size in options.sizes:
        times, threads = max(1, (1 << 22) // size), torch.get_num_threads()
        timers = {
            name: Timer("function()", globals={"function": function}, num_threads=threads)
            for name, function in operations(size).items()
        }
        rates: dict[str, list[float]] = {name: [] for name in timers}
        for _ in range(options.rounds):
            for name, timer in timers.items():
                rates[name].append(size / timer.timeit(times).mean)  # after two calls that compile and warm up
        print(f"\n{size:,} values: millions per second (median of {options.rounds})")
        for name, samples in rates.items():
            print(f"{name:24} {statistics.median(samples) / 1e6:8.0f}")


if __name__ == "__main__":
    main()
