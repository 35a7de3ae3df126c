"""Appendix B and Figures 6 to 8: the share of int8 rounding in a SwitchBack layer's time falls with its width, and the
layer overtakes 16-bit and 32-bit layers.

Quantization and dequantization touch each number once; products touch it once per input or output. The share of the
former falls with width. Operations are timed one at a time with all threads of this device, which must be idle
otherwise.
"""

from __future__ import annotations

import statistics

import torch

from limner.experiments.report import Finding
from limner.experiments.sweep import TrialRunner
from limner.planner.bench_linear import (
    Times,
    describe_device,
    layer_steps,
    matmuls,
    median_speedup,
    switchback_steps,
    time_rounds,
)
from limner.progress import progress

CLAIM = "The share of quantizing falls with a layer's width, and a wide SwitchBack layer is faster than in 16 bits"
SOURCE = "Wortsman et al. 2023, App. B, Figures 6 to 8"

_ROUNDS = 7


def reproduce(trials: TrialRunner, quick: bool) -> Finding:
    """Time the layers. Times are not saved in `trials`, since they depend on the machine's load."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dims, rows = ((64, 128), (64,)) if quick else ((256, 512, 1_024, 2_048), (512, 2_048))
    if device.type == "cuda" and not quick:
        dims, rows = (1_024, 2_048, 4_096), (16_384, 65_536)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    table_rows, shares, speeds = [], {}, {}
    with progress("timing layers", len(dims) * len(rows), unit="layer") as bar:
        for b in rows:
            for d in dims:
                torch.manual_seed(0)
                x, g = (torch.randn(b, n, device=device, dtype=dtype) for n in (d, 4 * d))
                weight, times = torch.randn(4 * d, d, device=device), 1 if quick else _ROUNDS
                quantize, dequantize, multiply = _shares(
                    time_rounds(switchback_steps(x, weight, g), times, device),
                    time_rounds(matmuls(x, weight), times, device),
                )
                timed = time_rounds(layer_steps(x, g, simulated=False), times, device)
                switchback = timed["SwitchBackLinear"]
                speedups = {key: median_speedup(timed[key], switchback) for key in ("nn.Linear fp32", "nn.Linear bf16")}
                standard = median_speedup(timed["StandardLinear"], switchback)
                shares.setdefault(b, []).append((d, 100 * (quantize + dequantize)))
                speeds.setdefault(b, []).append((d, speedups["nn.Linear bf16"]))
                percent = (f"{share:.0%}" for share in (quantize, dequantize, multiply))
                factors = (f"{value:.2f}" for value in (*speedups.values(), standard))
                table_rows.append((f"{b:,}", f"{d:,} -> {4 * d:,}", *percent, *factors))
                bar.advance()
    share_falls = all(points[-1][1] < points[0][1] for points in shares.values())
    widest = [points[-1][1] for points in speeds.values()]
    return Finding(
        name="switchback-speed",
        claim=CLAIM,
        source=SOURCE,
        holds=share_falls and min(widest) > 1,
        verdict=f"On {describe_device(device)} with {torch.get_num_threads()} threads, quantization takes "
        + " and ".join(f"{points[0][1]:.0f}% (width {points[0][0]}) to {points[-1][1]:.0f}% ({points[-1][0]:,}) with "
                       f"{b:,} rows" for b, points in shares.items())
        + f"; at the largest width SwitchBack is {min(widest):.2f} to {max(widest):.2f} times as fast as bf16.",
        header=("rows", "layer", "quantize", "dequantize", "multiply", "times as fast as fp32", "as bf16",
                "as Algorithm 5"),
        rows=table_rows,
        curves={
            "percent of quantizing and dequantizing, over the width": {f"{b:,} rows": p for b, p in shares.items()},
            "times as fast as bf16, over the width": {f"{b:,} rows": p for b, p in speeds.items()},
        },
        settings={"rounds": _ROUNDS, "format given to the layers": str(dtype).removeprefix("torch.")},
    )  # fmt: skip


def _shares(steps: Times, products: Times) -> tuple[float, float, float]:
    """Return the time shares of quantization, dequantization and products in a SwitchBack layer. Dequantization that
    is not timed alone counts as part of the product."""
    seconds = {name: statistics.median(times) for name, times in steps.items()}
    quantize = sum(value for name, value in seconds.items() if name.startswith("quantize"))
    total, matmul = sum(seconds.values()), seconds["forward"] + seconds["input gradient"]
    unscaled = products.get("int8, sums alone")
    dequantize = 0.0
    if unscaled is not None:
        scaled = next(times for name, times in products.items() if name.startswith("int8 ("))
        dequantize = matmul * max(0.0, 1 - statistics.median(unscaled) / statistics.median(scaled))
    return quantize / total, dequantize / total, (total - quantize - dequantize) / total
