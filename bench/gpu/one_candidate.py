"""Entry 4: drawing of one picture and steps of optimizers, by kernel.

python bench/gpu/one_candidate.py

drawing      time of a step of one candidate of `xl`, uncompiled and compiled, its kernels, and its bound: the bytes
             of weights, keys and values that it reads, at the measured rate of a copy
optimizer    a step of StableAdamW, in fp32 and with 16-bit state, on the tensors of `xl`: its ratio to torch's
             fused AdamW in alternation, and its kernels. The time that no kernel takes is the host's
"""

from __future__ import annotations

import itertools
import statistics
import sys
from math import prod
from pathlib import Path
from typing import Any

import torch
from common import DEVICE, Results, kernel_times, parser

from limner.models.transformer import SIZES, TransformerConfig
from limner.planner.cost import decode_step
from limner.planner.throughput import DeviceRates, mean_step, measure_rates, prepare_generation

sys.path.insert(0, str(Path(__file__).parents[1]))
from optimizers import BASE, FACTORIES, optimizer_step, parameter_shapes, time_steps

OPTIMIZERS = {name: FACTORIES[name] for name in (BASE, "StableAdamW", "StableAdamW, 16 bits")}


def main() -> None:
    """Measure drawing, then the optimizers."""
    options = parser(__doc__).parse_args()
    results = Results("one_candidate", options)
    size = "tiny" if options.quick else "xl"
    rates = results.measure("rates", lambda: vars(measure_rates(DEVICE)))
    for compiled in (False,) if options.quick else (False, True):
        name = "drawing, compiled" if compiled else "drawing"
        results.measure(name, lambda c=compiled: drawing(SIZES[size], DeviceRates(**rates), c))
    rounds = 1 if options.quick else 9
    results.measure("optimizers", lambda: optimizers(size, rounds))


@torch.inference_mode()
def drawing(config: TransformerConfig, rates: DeviceRates, compiled: bool) -> dict[str, Any]:
    """Return the time of a step, its bound, the share of that bound, and its kernels in the middle of a picture."""
    _, _, step = prepare_generation(config, 1, DEVICE, compiled=compiled)
    length = prod(config.grid)
    seconds = mean_step(step, length, 16)
    _, bytes_read = decode_step(config, 1)
    positions = itertools.count(length // 2)
    kernels = kernel_times(lambda: step(next(positions)), 20)
    return {
        "kernels": kernels[:30],
        "milliseconds": 1e3 * seconds,
        "bound, milliseconds": 1e3 * bytes_read / rates.copy,
        "share of the bound": bytes_read / rates.copy / seconds,
        "milliseconds of kernels": sum(x["microseconds"] for x in kernels) / 1e3,
    }


def optimizers(size: str, rounds: int) -> dict[str, Any]:
    """Return the time of a step of each optimizer, its ratio to `BASE`, and its kernels."""
    shapes = parameter_shapes(size)
    times = time_steps(OPTIMIZERS, shapes, DEVICE.type, rounds, 3)
    return {name: _optimizer(name, times, shapes) for name in OPTIMIZERS}


def _optimizer(name: str, times: dict[str, list[float]], shapes: list[torch.Size]) -> dict[str, Any]:
    step = optimizer_step(OPTIMIZERS[name], shapes, DEVICE.type)
    step()  # allocates the state
    kernels = kernel_times(step, 3)
    return {
        "kernels": kernels[:10],
        "milliseconds": 1e3 * statistics.median(times[name]),
        f"times {BASE}": statistics.median(a / b for a, b in zip(times[name], times[BASE], strict=True)),
        "milliseconds of kernels": sum(x["microseconds"] for x in kernels) / 1e3,
    }


if __name__ == "__main__":
    main()
