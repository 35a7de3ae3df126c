"""Trials of 8-bit training measure bytes and errors; criteria can hold and can fail."""

import pytest

from limner.experiments import eight_bits
from limner.experiments.eight_bits import FLOAT8, INT8, SIZES, accuracy_trial
from limner.numerics.precision import Fp32
from limner.optim.optimizers import StableAdamWConfig
from toy_sweeps import reproduce


def run_trial(precision):
    return accuracy_trial(precision=precision, width=16, depth=1, steps=1, batch=4, count=64, seed=0)


def test_m_saves_fewer_bytes_and_fp32_has_no_error():
    fp32, plain, m = (run_trial(precision) for precision in (Fp32(), INT8["SwitchBack"], INT8["SwitchBackM"]))
    assert fp32["error"] == 0 < plain["error"] < 0.5 and m["saved"] < 0.95 * plain["saved"] <= fp32["saved"]


def test_trials_have_the_papers_set_up(monkeypatch):
    """Patch dropout, StableAdamW, warm-up for a quarter, cosine, no clipping (§2.2.2)."""
    states, train = [], eight_bits.train_clip

    def record(**settings):
        run, losses = train(**settings)
        states.append(run)
        return run, losses

    monkeypatch.setattr(eight_bits, "train_clip", record)
    run_trial(INT8["bf16"])
    config, model = states[0].config, states[0].model.config
    assert (model.patch_dropout, model.width, model.depth) == (0.5, 16, 1)
    assert config.optimizer == StableAdamWConfig(lr=2e-3, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.2)
    assert config.clip_norm is None


def cells(names, lost):
    """A cell for each size and product; `lost` has the accuracy lost in the smallest and the other models."""
    return [
        {"loss": [1.0] * 300, "accuracy": 0.9 - lost.get(name, (0, 0))[width != min(SIZES)], "saved": 1e6, "error": 0.1}
        for width in SIZES
        for name in names
    ]


@pytest.mark.parametrize(
    ("name", "names", "lost", "holds"),
    [
        ("switchback-accuracy", INT8, {"LLM.int8()": (0.01, 0.06)}, True),
        ("switchback-accuracy", INT8, {"LLM.int8()": (0.06, 0.01)}, False),
        ("switchback-accuracy", INT8, {"LLM.int8()": (0.01, 0.06), "SwitchBackM": (0.0, 0.05)}, False),
        ("fp8-accuracy", FLOAT8, {"tensor-wise": (0.01, 0.5)}, True),
        ("fp8-accuracy", FLOAT8, {"tensor-wise": (0.01, 0.5), "SwitchBack": (0.0, 0.05)}, False),
        ("fp8-accuracy", FLOAT8, {"tensor-wise": (0.5, 0.01)}, False),
    ],
)
def test_claims_hold_and_fail(name, names, lost, holds, monkeypatch, tmp_path):
    assert reproduce(name, cells(names, lost), monkeypatch, tmp_path).holds is holds
