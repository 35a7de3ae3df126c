"""Time of a linear layer in each number format: its steps, its matrix products, forward and backward.

For Appendix B of Wortsman et al. 2023. Alternatives are timed alternately in each round, so that slow phases of the
machine affect all of them.

Shapes: b rows, n inputs, m outputs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from limner import compat
from limner.quantization import (
    Fp8SwitchBackLinear,
    Fp8TensorWiseLinear,
    LLMInt8Linear,
    StandardLinear,
    SwitchBackLinear,
    SwitchBackMLinear,
    SwitchBackQLinear,
)
from limner.quantization.products import int32_sums, product, select_kernel, weight_gradient
from limner.quantization.quantize import quantize

LAYERS = [SwitchBackLinear, SwitchBackMLinear, SwitchBackQLinear, LLMInt8Linear]
SIMULATED = [Fp8SwitchBackLinear, Fp8TensorWiseLinear]
Times = Mapping[str, list[float]]


def time_rounds(functions: Mapping[str, Callable[[], object]], times: int, device: torch.device) -> Times:
    """Return the seconds of each function in `times` rounds, after a warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(times + 1):
        for name, function in functions.items():
            _synchronize(device)
            start = time.perf_counter()
            function()
            _synchronize(device)
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def switchback_steps(
    x: Float[Tensor, "b n"], weight: Float[Tensor, "m n"], g: Float[Tensor, "b m"]
) -> dict[str, Callable[[], object]]:
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


def matmuls(x: Float[Tensor, "b n"], weight: Float[Tensor, "m n"]) -> dict[str, Callable[[], object]]:
    """Return x w^T in each format, and the int8 product without scales."""
    (q, scale_x), (w, scale_w) = quantize(x, by_row=True), quantize(weight, by_row=False)
    x32, w32, x16, w16 = x.float(), weight.float(), x.bfloat16(), weight.bfloat16()
    functions: dict[str, Callable[[], object]] = {
        "fp32": lambda: x32 @ w32.mT,
        "bf16": lambda: x16 @ w16.mT,
        f"int8 ({select_kernel(q, w)[0]})": lambda: product(q, w, scale_x, scale_w, None, x.dtype),
    }
    if select_kernel(q, w)[0] == "_int_mm":
        functions["int8, sums alone"] = lambda: int32_sums(q, w)
    return functions


def _fwd_bwd(layer: nn.Module, x: Tensor, g: Tensor) -> None:
    """Run forward and backward with cleared gradients."""
    x = x.detach().requires_grad_()
    layer.zero_grad(set_to_none=True)
    layer(x).backward(g)


def layer_steps(x: Float[Tensor, "b n"], g: Float[Tensor, "b m"], simulated: bool) -> dict[str, Callable[[], object]]:
    """Return forward and backward of all layers; 8-bit layers take the format of x."""
    n, m = x.shape[1], g.shape[1]
    linear = nn.Linear(n, m, device=x.device)
    functions: dict[str, Callable[[], object]] = {
        "nn.Linear fp32": partial(_fwd_bwd, linear, x.float(), g.float()),
        "nn.Linear bf16": partial(_fwd_bwd, nn.Linear(n, m, device=x.device).bfloat16(), x.bfloat16(), g.bfloat16()),
    }
    for kind in (StandardLinear, *LAYERS, *(SIMULATED if simulated else ())):
        functions[kind.__name__] = partial(_fwd_bwd, kind.from_linear(linear), x, g)
    return functions


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
    return (
        f"a CPU with {' and '.join(name for name, present in units.items() if present) or 'no unit for 8 or 16 bits'}"
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
