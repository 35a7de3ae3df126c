"""Kernels of layer norm and GELU that also quantize (`bench/gpu/fused_int8.py`), against torch's operations.
`test_triton.py` runs this file in a new process."""

import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import triton

from limner.models.transformer import Block
from limner.quantization import SwitchBackLinear
from limner.quantization.convert import convert
from limner.quantization.quantize import quantize

sys.path.insert(0, str(Path(__file__).parents[2] / "bench/gpu"))
import fused_int8

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
SHAPES = [(1, 1), (3, 7), (5, 64), (4, 130)]
ONE_STEP = {"rtol": 2**-7, "atol": 1e-5}  # of bf16: the interpreter truncates where a GPU rounds


def random(*shape):
    """Numbers whose rows differ in magnitude; the first row is of zeros."""
    x = torch.randn(shape, device=DEVICE) * torch.logspace(-3, 2, shape[0], device=DEVICE)[:, None]
    x[0] = 0
    return x


def check(values, scale, result, expected):
    torch.testing.assert_close(result, expected.to(result.dtype), **ONE_STEP)
    for ours, theirs in zip((values, scale), quantize(result, by_row=True), strict=True):
        assert torch.equal(ours, theirs)  # exact: the integers are those of the 16-bit result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm(shape, dtype):
    torch.manual_seed(0)
    x, gain, bias = random(*shape).to(dtype), *torch.randn(2, shape[1], device=DEVICE)
    values, scale, y, mean, rstd = fused_int8.norm_row_wise(x, gain, bias, 1e-5)
    expected, expected_mean, expected_rstd = torch.native_layer_norm(x.float(), shape[1:], gain, bias, 1e-5)
    check(values, scale, y, expected)
    torch.testing.assert_close(mean, expected_mean)
    torch.testing.assert_close(rstd, expected_rstd)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_gelu_and_its_gradient(shape, dtype):
    torch.manual_seed(0)
    u, g = random(*shape).to(dtype), torch.randn(shape, device=DEVICE).to(dtype)
    check(*fused_int8.gelu_row_wise(u), F.gelu(u.float()))
    x = u.float().requires_grad_()
    F.gelu(x).backward(g.float())
    check(*fused_int8.gelu_backward_row_wise(g, u), x.grad)


def test_a_value_that_is_not_finite_makes_its_row_not_finite():
    u = torch.randn(3, 40, device=DEVICE)
    u[1, 17] = torch.nan
    assert fused_int8.gelu_row_wise(u)[1].isfinite().tolist() == [True, False, True]


def test_a_fused_block_has_the_results_and_gradients_of_switchback_layers():
    torch.manual_seed(0)
    plain = convert(Block(32, 2), SwitchBackLinear.from_linear).to(DEVICE)
    for p in plain.parameters():
        torch.nn.init.normal_(p, std=0.2)
    fused = fused_int8.fuse(deepcopy(plain))
    x, g = torch.randn(2, 2, 5, 32, device=DEVICE)
    results = []
    for block in (plain, fused):
        leaf = x.clone().requires_grad_()
        with torch.autocast(DEVICE, torch.bfloat16):
            y = block(leaf, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
        y.backward(g)
        results.append({"y": y.detach() - x, "x": leaf.grad - g, **{n: p.grad for n, p in block.named_parameters()}})
    assert results[0].keys() == results[1].keys()
    for name, expected in results[0].items():
        error = (results[1][name] - expected).norm() / expected.norm()
        assert error < 0.03, name  # truncation (`ONE_STEP`) moves integers by one
