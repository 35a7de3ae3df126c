"""Delayed scales equal their definition; layer-scale begins at its gain; the criterion can hold and can fail."""

from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

from limner.experiments.float8 import DelayedScalingLinear, LayerScaleConfig, float8_trial
from limner.experiments.tiny_models import CLIP
from limner.quantization.low_precision import Fp8TensorWiseLinear
from toy_sweeps import reproduce


def layers():
    torch.manual_seed(0)
    linear = nn.Linear(8, 6)
    return DelayedScalingLinear.from_linear(linear), Fp8TensorWiseLinear.from_linear(linear)


def results(layer, x, g):
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(g)
    return y.detach(), x.grad, layer.weight.grad.clone(), layer.bias.grad.clone()


def test_the_first_scales_are_those_of_the_tensors():
    delayed, current = layers()
    x, g = torch.randn(5, 8), torch.randn(5, 6)
    torch.testing.assert_close(results(delayed, x, g), results(current, x, g), rtol=0, atol=0)


def quantized(x, largest, format):
    scale = largest / torch.finfo(format).max
    bound = torch.finfo(format).max
    return (x / scale).clamp(-bound, bound).to(format).float() * scale


def test_later_scales_are_moving_averages_of_earlier_maxima():
    """The readable definition, with numbers that grow and pass the largest of the format."""
    layer, _ = layers()
    averages = {}
    for step in range(4):
        x, g = torch.randn(5, 8) * 2**step, torch.randn(5, 6) / 2**step
        current = {"input": x.abs().max(), "weight": layer.weight.detach().abs().max(), "gradient": g.abs().max()}
        averages = averages or dict(current)
        formats = {"input": torch.float8_e4m3fn, "weight": torch.float8_e4m3fn, "gradient": torch.float8_e5m2}
        q, w, h = (
            quantized(value, averages[name], formats[name])
            for name, value in (("input", x), ("weight", layer.weight.detach()), ("gradient", g))
        )
        expected = q @ w.T + layer.bias.detach(), h @ w, h.T @ q, g.sum(0)
        torch.testing.assert_close(results(layer, x, g), expected, rtol=1e-4, atol=1e-5)
        averages = {name: 0.9 * average + 0.1 * current[name] for name, average in averages.items()}
        torch.testing.assert_close(layer.maxima, averages)


def test_evaluation_changes_no_scales():
    layer, _ = layers()
    layer(torch.randn(5, 8))
    before = dict(layer.maxima)
    layer.eval()(100 * torch.randn(5, 8))
    assert layer.maxima == before


def test_layer_scale_begins_at_its_gain():
    model = LayerScaleConfig(**asdict(replace(CLIP, depth=2, layer_scale=True)), gain=1e-4).build()
    gains = [p for name, p in model.named_parameters() if name.endswith("gain")]
    assert len(gains) == 2 * 2 * 2 and all(torch.all(gain == 1e-4) for gain in gains)


def test_a_trial_records_features_and_gradients():
    result = float8_trial(depth=2, gain=0.0, steps=2, batch=8, count=64, seed=0)
    assert len(result["begin"]) == len(result["end"]) == 2
    assert result["begin"][0] == pytest.approx(result["begin"][1])  # blocks are the identity
    assert len(result["last block"]) == len(result["gradient"]) == 2
    assert result["last block"][0][1] > result["last block"][0][0] == result["begin"][1]
    assert result["gradient"][0] == [0, 0] and result["gradient"][1][1] > 0  # the layer-scale has left zero


def cell(loss=1.0, last=1.0):
    series = {"last block": [[1.0, 2.0]], "gradient": [[0.0, 0.0]]}
    return {"loss": [loss] * 250, "accuracy": 0.5, "begin": [1.0, 1.0], "end": [1.0, last], **series}


@pytest.mark.parametrize(
    ("float8", "scaled", "last", "holds"),
    [(1.5, 1.0, 3.0, True), (0.9, 1.0, 3.0, False), (1.5, 1.7, 3.0, False), (1.5, 1.0, 0.5, False)],
)
def test_the_claim_holds_and_fails(float8, scaled, last, holds, monkeypatch, tmp_path):
    cells = [cell(1.0, last), cell(float8), cell(), cell(), cell(1.0), cell(scaled), cell(scaled), cell(scaled)]
    assert reproduce("fp8-layerscale", cells, monkeypatch, tmp_path).holds is holds
