"""Speed of SwitchBack (Wortsman et al. 2023, Appendix B): of layers, and of whole training steps.

Figures 6 and 7 (left): the share of int8 rounding in a SwitchBack layer's time falls with its width, and the layer
overtakes 16-bit and 32-bit layers. Times are of both layers of an MLP, d -> 4 d and 4 d -> d. Figures 7 (right) and 8
time whole updates of CLIP.

Quantization and dequantization touch each number once; products touch it once per input or output. The share of the
former falls with width. Operations are timed one at a time with all threads of this device, which must be idle
otherwise. Alternatives are timed alternately in each round, so that slow phases of the machine affect all of them.

Shapes: b rows, n inputs, m outputs.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from limner import compat
from limner.blocks import resblocks
from limner.experiments.report import Finding, experiment
from limner.experiments.sweep import all_above, over_seeds
from limner.experiments.tiny_models import resized_clip
from limner.models.contrastive import SIZES, CLIPConfig
from limner.numerics.precision import Bf16, Fp32
from limner.objectives.hard_negatives import HardNegativeLoss
from limner.planner.throughput import Times, time_rounds
from limner.progress import progress
from limner.quantization import StandardLinear, SwitchBackLinear
from limner.quantization.precisions import LLMInt8, SwitchBack, SwitchBackM
from limner.quantization.products import int32_sums, product, select_kernel, weight_gradient
from limner.quantization.quantize import quantize
from limner.training.config import TrainConfig
from limner.training.step import update
from limner.training.train_state import TrainState

ROUNDS = 7
Functions = dict[str, Callable[[], object]]


def switchback_steps(x: Float[Tensor, "b n"], weight: Float[Tensor, "m n"], g: Float[Tensor, "b m"]) -> Functions:
    """Return the steps of a SwitchBack layer."""
    (q, scale_x), (w, scale_w) = quantize(x, by_row=True), quantize(weight, by_row=False)
    (h, scale_g), (t, scale_t) = quantize(g, by_row=True), quantize(weight, by_row=False, transpose=True)
    counter = torch.zeros((), dtype=torch.int64)  # counts products, ignored
    return {
        "quantize x": lambda: quantize(x, by_row=True),
        "quantize w": lambda: quantize(weight, by_row=False),
        "quantize g": lambda: quantize(g, by_row=True),
        "quantize w^T": lambda: quantize(weight, by_row=False, transpose=True),
        "forward": lambda: product(q, w, scale_x, scale_w, None, x.dtype),
        "input gradient": lambda: product(h, t, scale_g, scale_t, None, x.dtype),
        "weight gradient": lambda: weight_gradient(g, x, counter).to(weight.dtype),
    }


def int8_sums(x: Float[Tensor, "b n"], weight: Float[Tensor, "m n"]) -> Functions:
    """Return the int8 product without scales; nothing if the kernel includes scales."""
    q, w = quantize(x, by_row=True)[0], quantize(weight, by_row=False)[0]
    return {"int8, sums alone": partial(int32_sums, q, w)} if select_kernel(q, w)[0] == "_int_mm" else {}


def forward_backward(layer: nn.Module, x: Float[Tensor, "b n"], g: Float[Tensor, "b m"]) -> None:
    """Run forward and backward with cleared gradients."""
    layer.zero_grad(set_to_none=True)
    layer(x.detach().requires_grad_()).backward(g)


def linear_layers(x: Float[Tensor, "b n"], g: Float[Tensor, "b m"], kinds: Sequence[Any]) -> Functions:
    """Return forward and backward of `nn.Linear` and of the layers of `kinds`, which take the format of x."""
    n, m = x.shape[1], g.shape[1]
    linear, linear16 = nn.Linear(n, m, device=x.device), nn.Linear(n, m, device=x.device).bfloat16()
    return {
        "nn.Linear fp32": partial(forward_backward, linear, x.float(), g.float()),
        "nn.Linear bf16": partial(forward_backward, linear16, x.bfloat16(), g.bfloat16()),
        **{kind.__name__: partial(forward_backward, kind.from_linear(linear), x, g) for kind in kinds},
    }


def median_speedup(base: list[float], other: list[float]) -> float:
    """Return the speedup over `base`, the median over rounds."""
    return statistics.median(a / b for a, b in zip(base, other, strict=True))


def describe_device(device: torch.device) -> str:
    """Return the name of a GPU, or the low-precision units of a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    units = {
        "VNNI": compat.is_vnni_supported(),
        "AVX512-BF16": compat.is_avx512_bf16_supported(),
        "AMX": compat.is_amx_tile_supported(),
    }
    present = " and ".join(name for name, is_present in units.items() if is_present)
    return f"a CPU with {present or 'no unit for 8 or 16 bits'}"


def time_shares(steps: Times) -> tuple[float, float, float]:
    """Return the time shares of quantization, dequantization and products in a SwitchBack layer. Dequantization that
    is not timed alone counts as part of the product."""
    seconds = {name: statistics.median(times) for name, times in steps.items()}
    sums = seconds.pop("int8, sums alone", seconds["forward"])
    quantize, total = sum(value for name, value in seconds.items() if "quantize" in name), sum(seconds.values())
    dequantize = (seconds["forward"] + seconds["input gradient"]) * max(0.0, 1 - sums / seconds["forward"])
    return quantize / total, dequantize / total, (total - quantize - dequantize) / total


def both_layers(up: Functions, down: Functions) -> Functions:
    """Return functions that run the function of each layer; without functions that only one layer has."""
    return {name: lambda name=name: (up[name](), down[name]()) for name in up if name in down}


@experiment(
    "The share of quantizing falls with a layer's width, and a wide SwitchBack layer is faster than in 16 bits",
    "Wortsman et al. 2023, App. B, Figures 6 and 7 (left)",
)
def switchback_speed(folder: Path, quick: bool) -> Finding:
    """Time the layers. Times are not saved in `folder`, since they depend on the machine's load."""
    device, dtype = torch.device("cpu"), torch.float32
    widths, rows = ((64, 128), (64,)) if quick else ((256, 512, 1_024, 2_048), (512, 2_048))
    if torch.cuda.is_available():
        device, dtype = torch.device("cuda"), torch.bfloat16
        if not quick:
            widths, rows = (1_024, 2_048, 4_096), (16_384, 65_536)
    rounds = 1 if quick else ROUNDS
    table, shares, speeds = [], {b: [] for b in rows}, {b: [] for b in rows}
    with progress("timing layers", len(widths) * len(rows), unit="layer") as bar:
        for b, d in itertools.product(rows, widths):
            torch.manual_seed(0)
            x, g = (torch.randn(b, n, device=device, dtype=dtype) for n in (d, 4 * d))
            weight = torch.randn(4 * d, d, device=device)
            mlp = (x, weight, g), (g, weight.mT.contiguous(), x)
            steps = both_layers(*(switchback_steps(x, w, g) | int8_sums(x, w) for x, w, g in mlp))
            parts = time_shares(time_rounds(steps, rounds))
            layers = both_layers(*(linear_layers(x, g, [StandardLinear, SwitchBackLinear]) for x, _, g in mlp))
            layers = time_rounds(layers, rounds)
            speedups = [
                median_speedup(layers[name], layers["SwitchBackLinear"])
                for name in ("nn.Linear fp32", "nn.Linear bf16", "StandardLinear")
            ]
            shares[b].append((d, 100 * (parts[0] + parts[1])))
            speeds[b].append((d, speedups[1]))
            cells = (*(f"{share:.0%}" for share in parts), *(f"{value:.2f}" for value in speedups))
            table.append((f"{b:,}", f"{d:,} -> {4 * d:,} -> {d:,}", *cells))
            bar.advance()
    widest = [points[-1][1] for points in speeds.values()]
    return Finding(
        holds=all(points[-1][1] < points[0][1] for points in shares.values()) and min(widest) > 1,
        verdict=f"On {describe_device(device)} with {torch.get_num_threads()} threads, quantization takes "
        + " and ".join(
            f"{points[0][1]:.0f}% (width {points[0][0]}) to {points[-1][1]:.0f}% ({points[-1][0]:,}) with {b:,} rows"
            for b, points in shares.items()
        )
        + f"; at the largest width SwitchBack is {min(widest):.2f} to {max(widest):.2f} times as fast as bf16.",
        header=("rows", "layer", "quantize", "dequantize", "multiply", "times as fast as fp32", "as bf16",
                "as Algorithm 5"),
        rows=table,
        curves={
            "percent of quantizing and dequantizing, over the width": {f"{b:,} rows": p for b, p in shares.items()},
            "times as fast as bf16, over the width": {f"{b:,} rows": p for b, p in speeds.items()},
        },
        settings={"rounds": ROUNDS, "format given to the layers": str(dtype).removeprefix("torch.")},
    )  # fmt: skip


class Standard(SwitchBack):
    """Algorithm 5 in place of SwitchBack, with the same formats of other operations."""

    layer = StandardLinear


TRAINING = {
    "nn.Linear fp32": Fp32(), "nn.Linear bf16": Bf16(), "Algorithm 5": Standard(), "SwitchBack": SwitchBack(),
    "SwitchBackM": SwitchBackM(), "LLM.int8()": LLMInt8(),
}  # fmt: skip


def training_steps(config: CLIPConfig, batch: int, device: torch.device) -> Functions:
    """Return an update of a CLIP model with checkpointing for each precision of `TRAINING`, on random samples."""
    shape = (batch, 3, config.size, config.size)
    samples = {
        "pixels": torch.randint(0, 256, shape, dtype=torch.uint8, device=device),
        "text": torch.randint(1, config.text_vocab, (batch, config.text_len), device=device),
    }
    functions: Functions = {}
    for name, precision in TRAINING.items():
        model, settings = config.build().to(device), TrainConfig(steps=1_000, batch_size=batch, precision=precision)
        blocks: dict[str, Any] = resblocks(model)
        for block in blocks.values():
            block.checkpointing = True
        functions[name] = partial(update, TrainState(model, HardNegativeLoss(), settings, device), samples)
    return functions


@experiment(
    "Training CLIP with SwitchBack is faster than in 16 bits and with LLM.int8(), the more so the larger the model",
    "Wortsman et al. 2023, App. B, Figures 7 (right) and 8",
)
def switchback_training(folder: Path, quick: bool) -> Finding:
    """Time updates of CLIP end to end, with checkpointing; all linear layers of the blocks change.

    Times are not saved, since they depend on the machine's load. Intervals are over rounds.
    """
    device, batch, models = torch.device("cpu"), 64, {f"width {w}": resized_clip(w, 2) for w in (256, 512, 1_024)}
    if torch.cuda.is_available():
        device, batch, models = torch.device("cuda"), 128, {f"ViT-{name}": SIZES[name] for name in ("B", "L")}
    if quick:
        batch, models = 8, {f"width {w}": resized_clip(w, 1) for w in (32, 64)}
    seconds, rounds = {}, 1 if quick else ROUNDS
    with progress("timing updates", len(models), unit="model") as bar:
        for model, config in models.items():
            times = time_rounds(training_steps(config, batch, device), rounds)
            seconds |= {(model, name): np.array(values) for name, values in times.items()}
            bar.advance()
    speedups = {(model, name): times / seconds[model, "SwitchBack"] for (model, name), times in seconds.items()}
    (smallest, *_, largest), (bf16, llm_int8) = models, ("nn.Linear bf16", "LLM.int8()")
    growth = speedups[largest, bf16] - speedups[smallest, bf16]
    gains = [over_seeds(speedups[largest, name] - 1, ".2f") for name in (bf16, llm_int8)]
    return Finding(
        holds=all_above([*gains, over_seeds(growth, ".2f")]),
        verdict=f"On {describe_device(device)} with {torch.get_num_threads()} threads, training with SwitchBack is "
        + "; ".join(
            ", ".join(str(over_seeds(speedups[model, name], ".2f")) for model in models)
            + f" times as fast as with {name}"
            for name in (bf16, "Algorithm 5", llm_int8)
        )
        + f", from {smallest} to {largest}.",
        header=("model", "products", "seconds per update", "times as fast with SwitchBack"),
        rows=[
            (*label, f"{np.median(times):.3f}", str(over_seeds(speedups[label], ".2f")))
            for label, times in seconds.items()
        ],
        settings={"rounds": rounds, "batch": batch},
    )
