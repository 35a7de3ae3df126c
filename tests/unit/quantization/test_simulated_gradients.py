"""Layers with rounded gradients: as a cast to fp16 rounds them, overflow included; the forward pass untouched."""

import math

import pytest
import torch
from torch import nn

from limner.numerics.formats import FloatFormat
from limner.quantization.simulated_gradients import SimulatedGradientLinear, simulate_cast

HALF = FloatFormat(1, 5, 10)  # fp16's numbers and those that it keeps for infinities and NaN
TINY = FloatFormat(1, 4, 3)


def test_numbers_are_rounded_as_a_cast_rounds_them():
    torch.manual_seed(0)
    x = torch.randn(20_000) * torch.exp2(torch.randint(-30, 14, (20_000,)).float())
    assert torch.equal(simulate_cast(x, HALF), x.half().float())
    odd = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan])
    found = simulate_cast(odd, HALF)
    assert torch.equal(found[:4], odd[:4]) and found[4].isnan()


@pytest.mark.parametrize("form", [HALF, TINY], ids=str)
def test_the_largest_number_is_the_last_before_infinity(form):
    step = 2.0 ** (math.frexp(form.max)[1] - 1 - form.mantissa)
    x = torch.tensor([form.max, form.max + step * 0.49, form.max + step / 2, -form.max - step])
    assert simulate_cast(x, form).tolist() == [form.max, form.max, math.inf, -math.inf]


@pytest.mark.parametrize("shape", [(5,), (0, 5), (2, 0, 5)])
def test_one_row_or_none_is_as_of_a_linear_layer(shape):
    linear, x = nn.Linear(5, 7), torch.randn(shape, requires_grad=True)
    layer = SimulatedGradientLinear(linear, FloatFormat(1, 6, 9, bias=40))
    for ours, theirs in zip(
        *(torch.autograd.grad(f(x).sum(), [x, *linear.parameters()]) for f in (layer, linear)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_a_linear_layer_rounded(bias):
    torch.manual_seed(0)
    linear = nn.Linear(5, 7, bias)
    layer = SimulatedGradientLinear(linear, TINY)
    assert dict(layer.state_dict()).keys() == dict(linear.state_dict()).keys()
    x = torch.randn(2, 3, 5, requires_grad=True)
    y = layer(x)
    assert torch.equal(y, linear(x))
    grad = torch.randn_like(y)
    found = torch.autograd.grad(y, [x, *layer.parameters()], grad)
    small = simulate_cast(grad, TINY)
    expected = [small @ linear.weight, small.flatten(0, 1).T @ x.flatten(0, 1), small.sum((0, 1))]
    for ours, theirs in zip(found, expected, strict=False):
        torch.testing.assert_close(ours, simulate_cast(theirs, TINY))
    lost = torch.autograd.grad(layer(x), [x], grad * 1e-6)[0]
    assert not lost.any()
    assert not torch.autograd.grad(layer(x), [linear.weight], grad * 1e6)[0].isfinite().any()
