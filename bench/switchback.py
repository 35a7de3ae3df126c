"""What a linear layer that trains in 8 bits costs, and where (Wortsman et al. 2023, Appendix B, Figures 6 and 7).

    python bench/switchback.py                             # the device at hand
    python bench/switchback.py --dims 1280 --rows 65536    # the layers of a CLIP ViT-Huge, on a GPU

For each width d and number of rows b (batch size times positions) an MLP's first layer, d -> 4 d:

    parts       a SwitchBack layer's steps, one by one: quantise, product with its scales, weight gradient
    products    the rate of a product alone in each format
    layers      forward and backward of every layer, against `nn.Linear` in fp32 and in bf16 and `StandardLinear`

The sides take turns, round after round; what is printed are medians over rounds, and of the ratios within each. Started
as `limner train` starts, with memory kept by the allocator (`limner.cli.memory`).
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from limner.cli.memory import settle_allocator
from limner.layers import (
    Fp8SwitchBackLinear,
    Fp8TensorWiseLinear,
    LLMInt8Linear,
    StandardLinear,
    SwitchBackLinear,
    SwitchBackMLinear,
    SwitchBackQLinear,
    int8,
)
from limner.layers.low_precision import weight_gradient
from limner.layers.quantize import row_wise, tensor_wise, tensor_wise_transposed
from limner.numerics.precision import has_fast_bf16

LAYERS = [SwitchBackLinear, SwitchBackMLinear, SwitchBackQLinear, LLMInt8Linear]
SIMULATED = [Fp8SwitchBackLinear, Fp8TensorWiseLinear]
Times = Mapping[str, list[float]]


def rounds(sides: Mapping[str, Callable[[], object]], times: int, device: torch.device) -> Times:
    """Seconds of each side, in turn, `times` times, after a round that warms up."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(times + 1):
        for name, act in sides.items():
            _settle(device)
            begun = time.perf_counter()
            act()
            _settle(device)
            if number:
                found[name].append(time.perf_counter() - begun)
    return found


def parts(x: Tensor, weight: Tensor, g: Tensor) -> dict[str, Callable[[], object]]:
    """The steps of a SwitchBack layer."""
    (q, scale_x), (w, scale_w) = row_wise(x), tensor_wise(weight)
    (h, scale_g), (t, scale_t) = row_wise(g), tensor_wise_transposed(weight)
    return {
        "quantise x": lambda: row_wise(x),
        "quantise w": lambda: tensor_wise(weight),
        "quantise g": lambda: row_wise(g),
        "quantise w^T": lambda: tensor_wise_transposed(weight),
        "forward": lambda: int8.product(q, w, scale_x, scale_w, None, x.dtype),
        "input gradient": lambda: int8.product(h, t, scale_g, scale_t, None, x.dtype),
        "weight gradient": lambda: weight_gradient(g, x, weight.dtype, 0),
    }


def products(x: Tensor, weight: Tensor) -> dict[str, Callable[[], object]]:
    """x w^T in each format, and the int8 sums alone without their scales."""
    (q, scale_x), (w, scale_w) = row_wise(x), tensor_wise(weight)
    x32, w32, x16, w16 = x.float(), weight.float(), x.bfloat16(), weight.bfloat16()
    found: dict[str, Callable[[], object]] = {
        "fp32": lambda: x32 @ w32.mT,
        "bf16": lambda: x16 @ w16.mT,
        f"int8 ({int8.kernel(q, w)[0]})": lambda: int8.product(q, w, scale_x, scale_w, None, x.dtype),
    }
    if int8.kernel(q, w)[0] == "_int_mm":
        found["int8, sums alone"] = lambda: torch._int_mm(q, w.mT)
    return found


def step(layer: nn.Module, x: Tensor, g: Tensor) -> None:
    """Forward and backward, with new gradients each time."""
    x = x.detach().requires_grad_()
    layer.zero_grad(set_to_none=True)
    layer(x).backward(g)


def layers(x: Tensor, g: Tensor, simulated: bool) -> dict[str, Callable[[], object]]:
    """Forward and backward of all layers; those of 8 bits take the format of x."""
    n, m = x.shape[1], g.shape[1]
    ordinary = nn.Linear(n, m, device=x.device)
    sides: dict[str, Callable[[], object]] = {
        "nn.Linear fp32": partial(step, ordinary, x.float(), g.float()),
        "nn.Linear bf16": partial(step, nn.Linear(n, m, device=x.device).bfloat16(), x.bfloat16(), g.bfloat16()),
    }
    for kind in (StandardLinear, *LAYERS, *(SIMULATED if simulated else ())):
        sides[kind.__name__] = partial(step, kind.of(ordinary), x, g)
    return sides


def main() -> None:
    parser = argparse.ArgumentParser(description="linear layers in 8 bits: their parts, and their speed")
    parser.add_argument("--dims", type=int, nargs="+", default=[256, 512, 1_024])
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 2_048])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--float8", action="store_true", help="time the float8 layers, which most processors simulate")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    where = torch.cuda.get_device_name() if device.type == "cuda" else _processor()
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} threads, {where}")
    print(f"layers of 8 bits are given {str(dtype).removeprefix('torch.')}; {options.rounds} rounds")
    for d in options.dims:
        for b in options.rows:
            torch.manual_seed(0)
            x, g = (torch.randn(b, n, device=device, dtype=dtype) for n in (d, 4 * d))
            weight = torch.randn(4 * d, d, device=device)
            print(f"\n{b:,} rows, {d:,} -> {4 * d:,}")
            _show_parts(rounds(parts(x, weight, g), options.rounds, device))
            _show_products(rounds(products(x, weight), options.rounds, device), 2 * b * d * 4 * d)
            _show_layers(rounds(layers(x, g, options.float8), options.rounds, device))


def _show_parts(found: Times) -> None:
    whole = sum(statistics.median(times) for times in found.values())
    quantising = sum(statistics.median(times) for name, times in found.items() if name.startswith("quantise"))
    print(f"  parts of SwitchBack: quantising takes {quantising / whole:.0%}")
    for name, times in found.items():
        print(f"    {name:20} {1e3 * statistics.median(times):9.3f} ms  {statistics.median(times) / whole:5.0%}")


def _show_products(found: Times, flop: int) -> None:
    print("  products                TOP/s  fp32 is 1")
    for name, times in found.items():
        print(f"    {name:20} {flop / statistics.median(times) / 1e12:6.2f}  {_ratio(found['fp32'], times):9.2f}")


def _show_layers(found: Times) -> None:
    bases = ["nn.Linear fp32", "nn.Linear bf16", "StandardLinear"]
    print(f"  {'forward and backward':24} ms  times as fast as {', '.join(bases)}")
    for name, times in found.items():
        ratios = "".join(f"{_ratio(found[base], times):16.2f}" for base in bases)
        print(f"    {name:20} {1e3 * statistics.median(times):8.2f}{ratios}")


def _ratio(base: list[float], times: list[float]) -> float:
    """How many times as fast as the base, the median of rounds."""
    return statistics.median(one / other for one, other in zip(base, times, strict=True))


def _processor() -> str:
    kinds = {"VNNI": torch.cpu._is_vnni_supported(), "AMX": has_fast_bf16(torch.device("cpu"))}
    return f"a CPU with {' and '.join(name for name, there in kinds.items() if there) or 'neither VNNI nor AMX'}"


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    settle_allocator()
    main()
