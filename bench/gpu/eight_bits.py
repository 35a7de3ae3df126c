"""Entry 3: a transformer block in bf16 and in eight bits, where quantization is fused and where it is not.

    python bench/gpu/eight_bits.py

Forward and backward of a block (layer norms, qkv and output matrices, causal attention, an MLP with GELU, residuals)
under autocast, with 32 sequences of 1,024 positions. The results have medians over rounds, ratios to the compiled
bf16 block, and the relative errors of the block's branches and of a weight gradient against fp32.

    bf16, int8, float8     `nn.Linear`, `SwitchBackLinear`, `Fp8SwitchBackLinear`
    ... compiled           the same under `torch.compile`, which fuses float8 quantization with layer norm and GELU;
                           int8 quantization and all 8-bit products are opaque operations
    int8 fused             compiled, with int8 quantization of rows as plain operations (`quantize_plainly`), which the
                           compiler fuses too
    int8 Triton            not compiled, with quantization in Triton kernels of layer norm and GELU (`fused_int8.py`)
    float8 fused           compiled, with cuBLAS's product without scales (`multiply_plainly`); scales and bias are
                           plain operations, which the compiler fuses with those that follow. torch's product with a
                           scale for each row is slow unless it sums in fewer bits (pytorch/ao#1325)
    float8 fused, fast     the same with sums in fewer bits
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from common import DEVICE, Results, kernel_times, parser
from torch import Tensor

from limner import compat
from limner.experiments.switchback_speed import median_speedup
from limner.models.transformer import Block
from limner.numerics.formats import INT8_MAX
from limner.planner.throughput import time_rounds
from limner.quantization import Fp8SwitchBackLinear, SwitchBackLinear, low_precision
from limner.quantization.convert import convert
from limner.quantization.quantize import quantize, scale_and_inverse

LAYERS = {"bf16": None, "int8": SwitchBackLinear, "float8": Fp8SwitchBackLinear}
VARIANTS = [
    *LAYERS,
    *(f"{name} compiled" for name in LAYERS),
    "int8 fused",
    "int8 Triton",
    "float8 fused",
    "float8 fused, fast",
]
QUICK = ["bf16", "bf16 compiled", "int8 fused", "float8 fused"]
BASE = "bf16 compiled"


def main() -> None:
    """Measure a block of each width."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--dims", type=int, nargs="+", default=[2_048, 4_096, 1_024])
    options_parser.add_argument("--rounds", type=int, default=7)
    options = options_parser.parse_args()
    results = Results("eight_bits", options)
    dims, shape, rounds = ([64], (2, 32), 1) if options.quick else (options.dims, (32, 1_024), options.rounds)
    variants = QUICK if options.quick else VARIANTS
    for dim in dims:
        table = results.measure(f"width {dim}", lambda d=dim: measure(variants, d, shape, rounds))
        for name, row in table.items() if "error" not in table else ():
            print(name, {key: value for key, value in row.items() if key != "kernels"})


def measure(variants: list[str], dim: int, shape: tuple[int, int], rounds: int) -> dict[str, Any]:
    """Return time, ratio and errors of each variant of a block of this width."""
    torch.manual_seed(0)
    block = Block(dim, max(1, dim // 64)).to(DEVICE)
    x, g = (torch.randn(*shape, dim, device=DEVICE) for _ in range(2))
    reference = run(block, x, g, torch.float32)()
    functions: dict[str, Callable[[], object]] = {}
    table: dict[str, Any] = {}
    for name in variants:
        function = variant(name, block, x, g)
        try:
            y, gradient = function()
            errors = {"error of branches": relative_error(y - x, reference[0] - x)}
            errors["of weight gradient"] = relative_error(gradient, reference[1])
        except Exception as error:  # one variant that fails does not end the others
            table[name] = {"failed": str(error)[-500:]}
        else:
            functions[name], table[name] = function, errors
    seconds = time_rounds(functions, rounds)
    for name, times in seconds.items():
        table[name]["milliseconds"] = 1e3 * statistics.median(times)
        table[name][f"times as fast as {BASE}"] = median_speedup(seconds[BASE], times) if BASE in seconds else None
        table[name]["kernels"] = kernel_times(functions[name], 3)[:12]
    return table


def variant(name: str, block: Block, x: Tensor, g: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return forward and backward of a copy of the block in the format that the variant's name begins with."""
    block, layer = deepcopy(block), LAYERS[name.split()[0]]
    if layer is not None:
        convert(block, layer.from_linear)
    if "Triton" in name:
        from fused_int8 import fuse  # needs Triton

        block = fuse(block)
    elif " " in name:
        block.compile(dynamic=False)
    function = run(block, x, g, torch.bfloat16)

    plain = {}
    if "fused" in name:
        plain["quantize"] = quantize_plainly
        if layer is Fp8SwitchBackLinear:
            plain["product"] = partial(multiply_plainly, "fast" in name)

    def patched() -> tuple[Tensor, Tensor]:
        with patch.multiple(low_precision, **plain) if plain else nullcontext():
            return function()

    return patched


def run(block: Block, x: Tensor, g: Tensor, dtype: torch.dtype) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a function that runs forward and backward, and returns the output and a weight gradient."""

    def forward_backward() -> tuple[Tensor, Tensor]:
        block.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32):
            y = block(x.detach().requires_grad_(), attend)
        y.backward(g)
        gradient = block.get_parameter("mlp.branch.up.weight").grad
        assert gradient is not None
        return y.detach(), gradient

    return forward_backward


def relative_error(result: Tensor, reference: Tensor) -> float:
    """Return ||result - reference|| / ||reference||."""
    return ((result - reference).norm() / reference.norm()).item()


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def quantize_plainly(
    x: Tensor, by_row: bool, format: torch.dtype = torch.int8, transpose: bool = False
) -> tuple[Tensor, Tensor]:
    """`quantize`, with operations that torch.compile fuses with those before them for int8 by rows."""
    if format != torch.int8 or transpose or not by_row:
        return quantize(x, by_row, format, transpose)
    scale, inverse = scale_and_inverse(x.abs().amax(1, keepdim=True), INT8_MAX)
    return (x.float() * inverse).round().to(torch.int8), scale.flatten()


def multiply_plainly(
    fast: bool,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *_: object,
) -> Tensor:
    """`product` of float8 matrices in operations that torch.compile fuses with those after it. The first operand of a
    layer's products has a scale for each row, the second one scale."""
    one = torch.ones((), device=a.device)
    y = compat.scaled_mm(a, b.contiguous().mT, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)
    y = y * scale_a[:, None] * scale_b
    return (y if bias is None else y + bias).to(dtype)


if __name__ == "__main__":
    main()
