"""Packed layers give the bits of plain ones, layers of 8 bits nearly."""

import copy
import itertools

import pytest
import torch
from torch import nn

from limner.models.transformer import TransformerConfig
from limner.quantization import inference_linear
from limner.quantization.inference_linear import (
    DotLinear,
    Int8Linear,
    PackedLinear,
    pack_linears,
    supports_packed_linear,
)
from limner.sampling.decoder import TokenDecoder

needs_packing = pytest.mark.skipif(not supports_packed_linear(), reason="oneDNN does not pack bf16 weights here")


@needs_packing
@pytest.mark.parametrize("rows", [1, 5, 64, 300])
@pytest.mark.parametrize(("n_in", "n_out"), [(16, 48), (48, 16), (33, 7)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_is_the_layer(rows, n_in, n_out, bias):
    torch.manual_seed(rows)
    layer = nn.Linear(n_in, n_out, bias=bias).bfloat16()
    x = torch.randn(rows, 2, n_in, dtype=torch.bfloat16)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(layer)(x), layer(x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("rows", [1, 4, 5, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_8_bit_weights_are_off_by_half_a_step_at_most(rows, dtype, bias):
    torch.manual_seed(rows)
    layer = nn.Linear(48, 32, bias=bias)
    x = torch.randn(rows, 2, 48)
    step = layer.weight.abs().amax(1) / 127
    bound = x.abs().sum(-1, keepdim=True) * step / 2
    with torch.inference_mode():
        want, got = layer(x), Int8Linear(layer.to(dtype))(x.to(dtype))
    assert got.dtype == dtype
    slack = 1e-5 if dtype == torch.float32 else 3e-2
    assert ((got - want).abs() <= bound + slack).all()
    assert Int8Linear(layer).weight.nbytes * torch.finfo(dtype).bits // 8 == layer.weight.nbytes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 15, 16, 17, 40])
def test_8_bit_weights_of_any_size_are_multiplied_within_their_memory(dtype, n):
    """torch's kernel for bf16 reads 16 numbers at a time."""
    torch.manual_seed(n)
    for rows, m in itertools.product((1, 2, 3, 4, 5), (1, 2, 3, 4, 5)):
        layer, x = Int8Linear(nn.Linear(n, m).to(dtype)), torch.randn(rows, n).to(dtype)
        found = layer(x)
        assert found.dtype == dtype
        expected = x.double() @ layer.weight.double().mT * layer.scale.double() + layer.bias.double()
        tolerance = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * n**0.5)


@needs_packing
def test_small_packed_layers_are_right_in_every_layout():
    torch.manual_seed(0)
    for rows, n, m in itertools.product((1, 2, 3, 4), repeat=3):
        layer, x = nn.Linear(n, m).bfloat16(), torch.randn(rows, n).bfloat16()
        for y in (x, x.mT.clone(memory_format=torch.contiguous_format).mT):
            with torch.inference_mode():
                torch.testing.assert_close(PackedLinear(layer)(y), layer(x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_of_products_are_the_layer_for_one_row(dtype, bias):
    layer = nn.Linear(70, 33, bias=bias).to(dtype)
    for shape in ((1, 70), (1, 1, 70)):
        x = torch.randn(shape).to(dtype)
        found = DotLinear(layer)(x)
        assert found.dtype == dtype
        tolerance = {torch.float64: 1e-13, torch.float32: 1e-5}.get(dtype, 2e-2)
        torch.testing.assert_close(found, layer(x), atol=tolerance, rtol=tolerance)


def test_a_processor_that_packs_no_bf16_keeps_ordinary_layers(monkeypatch):
    monkeypatch.setattr(inference_linear, "supports_packed_linear", lambda: False)
    assert type(pack_linears(nn.Linear(4, 4).bfloat16())) is nn.Linear


@needs_packing
def test_a_packed_model_draws_what_the_plain_one_draws():
    torch.manual_seed(0)
    model = TransformerConfig(
        text_vocab=20, image_vocab=12, text_len=3, grid=(4, 4), width=32, depth=3, heads=2, kernel=3
    ).build()
    model = model.eval().bfloat16()
    fast = pack_linears(copy.deepcopy(model))
    assert not any(type(module) is nn.Linear for module in fast.modules())
    with torch.inference_mode():
        text = torch.randint(0, 20, (2, 3))
        (cache, _), (fast_cache, _) = TokenDecoder(model).prefill(text), TokenDecoder(fast).prefill(text)
        cache, fast_cache = cache.expand(3), fast_cache.expand(3)
        for _ in range(5):
            token = torch.randint(0, 12, (6, 1))
            torch.testing.assert_close(
                TokenDecoder(fast).step(fast_cache, token), TokenDecoder(model).step(cache, token), rtol=2e-2, atol=2e-2
            )


def test_no_rows_in_8_bits_are_no_rows():
    assert Int8Linear(nn.Linear(8, 4))(torch.randn(3, 0, 8)).shape == (3, 0, 4)


@pytest.mark.skipif(not supports_packed_linear(), reason="this processor or build packs nothing")
def test_a_layer_that_is_watched_is_not_packed():
    model, seen = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).bfloat16(), []
    model[1].register_forward_hook(lambda *_: seen.append(1))
    assert [type(layer) for layer in pack_linears(model)] == [PackedLinear, nn.Linear]
    with torch.inference_mode():
        model(torch.ones(2, 8, dtype=torch.bfloat16))
    assert seen == [1]
    alone = nn.Sequential(model[1])
    assert pack_linears(alone) is alone and type(alone[0]) is nn.Linear
