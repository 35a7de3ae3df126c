"""Exponents of gradients are counted exactly; underflow matches a cast to the format."""

import pytest
import torch

from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Fp16, Fp32
from limner.objectives.autoregressive import Autoregressive
from limner.planner.grad_histogram import MIN_EXPONENT, SMALLEST_SUBNORMAL, ExponentHistogram, gradient_exponents
from limner.training.config import TrainConfig
from limner.training.train_state import TrainState


def test_exponents_are_counted():
    values = torch.tensor([1.0, 1.99, -2.0, 0.75, 2.0**-149, 3.4e38, 0.0, -0.0, float("inf"), float("nan")])
    histogram = ExponentHistogram.from_values(values)
    counts = {i + MIN_EXPONENT: int(n) for i, n in enumerate(histogram.counts) if n}
    assert counts == {0: 2, 1: 1, -1: 1, -149: 1, 127: 1}
    assert (histogram.zeros, histogram.nonfinite) == (2, 2)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp16", torch.float16), ("e5m2", torch.float8_e5m2), ("e4m3", torch.float8_e4m3fn), ("bf16", torch.bfloat16)],
)
def test_underflow_matches_a_cast(name, dtype):
    torch.manual_seed(0)
    low = -10 + torch.log2(torch.tensor(SMALLEST_SUBNORMAL[name]))
    values = torch.exp2(low + 14 * torch.rand(20_000)) * torch.randn(20_000).sign()
    values = values[values != 0]
    flushed = (values.to(dtype).float() == 0).double().mean().item()
    assert 0.3 < flushed < 0.9
    assert ExponentHistogram.from_values(values).underflow(SMALLEST_SUBNORMAL[name]) == pytest.approx(flushed, abs=5e-4)
    scaled = (values * 32).to(dtype).float()
    assert ExponentHistogram.from_values(values).underflow(SMALLEST_SUBNORMAL[name], 32) == pytest.approx(
        (scaled == 0).double().mean().item(), abs=5e-4
    )


def test_the_central_range():
    values = torch.exp2(torch.arange(-50, 50).float())
    assert ExponentHistogram.from_values(values).central_range(0.5) == (-25, 24)
    assert ExponentHistogram.from_values(torch.zeros(3)).central_range() == (0, 0)


def test_shares_are_of_nonzero_values():
    assert ExponentHistogram.from_values(torch.tensor([0.0, 0.25, 0.3, 1.0, -4.0])).shares() == [
        (-2, 0.5),
        (-1, 0),
        (0, 0.25),
        (1, 0),
        (2, 0.25),
    ]
    assert ExponentHistogram.from_values(torch.zeros(3)).shares() == []


def test_every_gradient_of_a_model_is_counted_once():
    torch.manual_seed(0)
    config = TransformerConfig(text_vocab=20, image_vocab=16, text_len=5, grid=(3, 3), width=16, depth=2, heads=2)
    run = TrainState(config.build(), Autoregressive(), TrainConfig(steps=1))
    batch = {"text": torch.randint(0, 20, (4, 5)), "image": torch.randint(0, 16, (4, 9))}
    parts = gradient_exponents(run, batch)
    blocks = [f"blocks.{i}.{kind}" for i in (0, 1) for kind in ("attention", "mlp")]
    assert [name for name, part in parts.items() if "activations" in part] == blocks
    n = 4 * (5 + 1 + 9 - 1) * 16  # activations of a branch; the last image token is not an input
    for name in blocks:
        entering = parts[name]["activations"]
        assert abs(int(entering.counts.sum()) + entering.zeros - n) <= 4 * 16
    total = sum(int(part["parameters"].counts.sum()) + part["parameters"].zeros for part in parts.values())
    assert total == sum(p.numel() for p in run.model.parameters())
    assert all(p.grad is None for p in run.model.parameters())
    assert "head.image" in parts and "embed.image" in parts


def test_a_run_in_fp16_reports_the_underflow_of_fp16():
    """The run's fp16 backward pass would flush these gradients to zero."""

    def small(model, batch, step, generator):
        loss, metrics = Autoregressive()(model, batch, step, generator)
        return loss * 1e-6, metrics

    torch.manual_seed(0)
    config = TransformerConfig(text_vocab=20, image_vocab=16, text_len=5, grid=(3, 3), width=16, depth=2, heads=2)
    model = config.build()
    batch = {"text": torch.randint(0, 20, (4, 5)), "image": torch.randint(0, 16, (4, 9))}
    fp32, fp16 = (
        gradient_exponents(TrainState(model, small, TrainConfig(steps=1, precision=precision)), batch)
        for precision in (Fp32(), Fp16())
    )
    assert fp32.keys() == fp16.keys()
    for name, histograms in fp16.items():
        assert all(torch.equal(x.counts, fp32[name][kind].counts) for kind, x in histograms.items())
        if "activations" in histograms:
            assert histograms["activations"].underflow(SMALLEST_SUBNORMAL["fp16"]) > 0.9
