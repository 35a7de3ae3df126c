"""What a linear layer costs in each number format, and where: its parts, its products, forward and backward.

For Appendix B of Wortsman et al. 2023. The sides of a comparison take turns, round after round, so that what slows the
machine slows them all.

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


def parts(
    x: Float[Tensor, "b n"], weight: Float[Tensor, "m n"], g: Float[Tensor, "b m"]
) -> dict[str, Callable[[], object]]:
    """The steps of a SwitchBack layer."""
    (q, scale_x), (w, scale_w) = row_wise(x), tensor_wise(weight)
    (h, scale_g), (t, scale_t) = row_wise(g), tensor_wise_transposed(weight)
    nobody = torch.zeros((), dtype=torch.int64)  # counts these products
    return {
        "quantise x": lambda: row_wise(x),
        "quantise w": lambda: tensor_wise(weight),
        "quantise g": lambda: row_wise(g),
        "quantise w^T": lambda: tensor_wise_transposed(weight),
        "forward": lambda: int8.product(q, w, scale_x, scale_w, None, x.dtype),
        "input gradient": lambda: int8.product(h, t, scale_g, scale_t, None, x.dtype),
        "weight gradient": lambda: weight_gradient(g, x, weight.dtype, nobody),
    }


def products(x: Float[Tensor, "b n"], weight: Float[Tensor, "m n"]) -> dict[str, Callable[[], object]]:
    """x w^T in each format, and the int8 sums alone without their scales."""
    (q, scale_x), (w, scale_w) = row_wise(x), tensor_wise(weight)
    x32, w32, x16, w16 = x.float(), weight.float(), x.bfloat16(), weight.bfloat16()
    found: dict[str, Callable[[], object]] = {
        "fp32": lambda: x32 @ w32.mT,
        "bf16": lambda: x16 @ w16.mT,
        f"int8 ({int8.kernel(q, w)[0]})": lambda: int8.product(q, w, scale_x, scale_w, None, x.dtype),
    }
    if int8.kernel(q, w)[0] == "_int_mm":
        found["int8, sums alone"] = lambda: int8.sums(q, w)
    return found


def step(layer: nn.Module, x: Tensor, g: Tensor) -> None:
    """Forward and backward, with new gradients each time."""
    x = x.detach().requires_grad_()
    layer.zero_grad(set_to_none=True)
    layer(x).backward(g)


def layers(x: Float[Tensor, "b n"], g: Float[Tensor, "b m"], simulated: bool) -> dict[str, Callable[[], object]]:
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


def times_as_fast(base: list[float], other: list[float]) -> float:
    """How many times as fast as the base a side is: the median over rounds."""
    return statistics.median(one / two for one, two in zip(base, other, strict=True))


def processor(device: torch.device) -> str:
    """The device, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    kinds = {
        "VNNI": torch.cpu._is_vnni_supported(),
        "AVX512-BF16": torch.cpu._is_avx512_bf16_supported(),
        "AMX": torch.cpu._is_amx_tile_supported(),
    }
    return f"a CPU with {' and '.join(name for name, there in kinds.items() if there) or 'no unit for 8 or 16 bits'}"


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
