"""Time of a linear layer that trains in 8 bits, by step (Wortsman et al. 2023, Appendix B, Figures 6 and 7).

    python bench/switchback.py                             # the current device
    python bench/switchback.py --dims 1280 --rows 65536    # the layers of a CLIP ViT-Huge, on a GPU

For each width d and number of rows b (batch size times positions) an MLP's first layer, d -> 4 d:

    steps       of a SwitchBack layer: quantization, product with its scales, weight gradient
    products    rate of a matrix product in each format
    layers      forward and backward of every layer, compared with `nn.Linear` in fp32 and in bf16 and `StandardLinear`

The output has medians over rounds, and medians of the ratios within a round. The allocator is tuned as in
`limner train` (`limner.cli.malloc_tuning`).
"""

from __future__ import annotations

import argparse
import platform
import statistics

import torch
from torch import Tensor

from limner.cli.malloc_tuning import restart_with_malloc_tunables
from limner.experiments.switchback_speed import (
    Functions,
    describe_device,
    int8_sums,
    linear_layers,
    median_speedup,
    switchback_steps,
)
from limner.planner.throughput import Times, time_rounds
from limner.quantization import (
    Fp8SwitchBackLinear,
    Fp8TensorWiseLinear,
    LLMInt8Linear,
    StandardLinear,
    SwitchBackLinear,
    SwitchBackMLinear,
    SwitchBackQLinear,
)
from limner.quantization.products import product, select_kernel
from limner.quantization.quantize import quantize

LAYERS = [StandardLinear, SwitchBackLinear, SwitchBackMLinear, SwitchBackQLinear, LLMInt8Linear]
FLOAT8_LAYERS = [Fp8SwitchBackLinear, Fp8TensorWiseLinear]


def main() -> None:
    """Time the steps, products and layers at each width and number of rows."""
    parser = argparse.ArgumentParser(description="speed of 8-bit linear layers and of their steps")
    parser.add_argument("--dims", type=int, nargs="+", default=[256, 512, 1_024])
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 2_048])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--float8", action="store_true", help="time the float8 layers, which most processors simulate")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(describe_device(device))
    print(f"input of 8-bit layers: {str(dtype).removeprefix('torch.')}; {options.rounds} rounds")
    for d in options.dims:
        for b in options.rows:
            torch.manual_seed(0)
            x, g = (torch.randn(b, n, device=device, dtype=dtype) for n in (d, 4 * d))
            weight = torch.randn(4 * d, d, device=device)
            print(f"\n{b:,} rows, {d:,} -> {4 * d:,}")
            _print_steps(time_rounds(switchback_steps(x, weight, g), options.rounds))
            _print_products(time_rounds(products(x, weight), options.rounds), 2 * b * d * 4 * d)
            layers = linear_layers(x, g, LAYERS + FLOAT8_LAYERS * options.float8)
            _print_layers(time_rounds(layers, options.rounds))


def products(x: Tensor, weight: Tensor) -> Functions:
    """Return x w^T in each format, and the int8 product without scales."""
    (q, scale_x), (w, scale_w) = quantize(x, by_row=True), quantize(weight, by_row=False)
    x32, w32, x16, w16 = x.float(), weight.float(), x.bfloat16(), weight.bfloat16()
    functions: Functions = {
        "fp32": lambda: x32 @ w32.mT,
        "bf16": lambda: x16 @ w16.mT,
        f"int8 ({select_kernel(q, w)[0]})": lambda: product(q, w, scale_x, scale_w, None, x.dtype),
    }
    return functions | int8_sums(x, weight)


def _print_steps(seconds: Times) -> None:
    total = sum(statistics.median(times) for times in seconds.values())
    quantization = sum(statistics.median(times) for name, times in seconds.items() if name.startswith("quantize"))
    print(f"  steps of SwitchBack: quantization takes {quantization / total:.0%}")
    for name, times in seconds.items():
        print(f"    {name:20} {1e3 * statistics.median(times):9.3f} ms  {statistics.median(times) / total:5.0%}")


def _print_products(seconds: Times, flop: int) -> None:
    print("  products                TOP/s  fp32 is 1")
    for name, times in seconds.items():
        rate = flop / statistics.median(times) / 1e12
        print(f"    {name:20} {rate:6.2f}  {median_speedup(seconds['fp32'], times):9.2f}")


def _print_layers(seconds: Times) -> None:
    bases = ["nn.Linear fp32", "nn.Linear bf16", "StandardLinear"]
    print(f"  {'forward and backward':24} ms  times as fast as {', '.join(bases)}")
    for name, times in seconds.items():
        ratios = "".join(f"{median_speedup(seconds[base], times):16.2f}" for base in bases)
        print(f"    {name:20} {1e3 * statistics.median(times):8.2f}{ratios}")


if __name__ == "__main__":
    restart_with_malloc_tunables()
    main()
