"""Overflows are recorded by name before a scaler removes them; the criterion can hold and can fail."""

import math

import pytest

from limner.experiments.sixteen_bits import FP16, SCALERS, early_share, most_overflows, overflow_trial
from limner.experiments.sweep import Runs
from toy_sweeps import reproduce


def test_the_format_has_the_maximum_of_fp16():
    assert FP16.max == 65_504


@pytest.mark.parametrize("name", SCALERS)
def test_a_trial_records_each_step(name):
    result = overflow_trial(scaler=SCALERS[name], lr=1e-3, steps=3, batch=8, count=64, seed=0)
    series = [result["loss"], result["scale"], result["rms"], *result["features"].values()]
    assert {len(values) for values in (*series, *result["gradients"].values())} == {3}
    assert result["scale"][0] == 16 and 0 <= result["lost"] <= 1
    overflowed = any(not math.isfinite(x) for x in result["gradients"]["patches.weight"])
    assert overflowed == ("patches.weight" in result["overflows"])
    if name == "a constant scale":
        assert set(result["scale"]) == {16}
    elif result["overflows"]:
        assert result["scale"][-1] < 16


def test_a_huge_scale_overflows_everywhere_and_is_halved(monkeypatch):
    for scaler in SCALERS.values():
        monkeypatch.setattr(scaler, "INIT_SCALE", 2.0**40)
    halved, constant = (
        overflow_trial(scaler=scaler, lr=1e-3, steps=3, batch=8, count=64, seed=0) for scaler in SCALERS.values()
    )
    assert halved["scale"] == [40, 39, 38] and halved["lost"] == 1
    assert halved["overflows"]["patches.weight"] == constant["overflows"]["patches.weight"] == 3
    assert 0.5 < constant["lost"] < 1  # layer norms outside the blocks keep finite gradients or not at all


def cell(overflows, lost):
    return {"loss": [1.0] * 600, "scale": [16.0], "overflows": overflows, "lost": lost, "rms": [1.0],
            "features": {"block 0": [1.0]}, "gradients": {"patches.weight": [1.0]}}  # fmt: skip


EARLY, LATE = {"patches.weight": 8, "image_blocks.2.mlp.norm.bias": 2}, {"image_blocks.2.mlp.norm.bias": 2}


@pytest.mark.parametrize(
    ("cells", "holds"),
    [
        ([cell(EARLY, 0.2), cell(EARLY, 0.1)], True),
        ([cell(LATE, 0.2), cell(LATE, 0.1)], False),
        ([cell(EARLY, 0.1), cell(EARLY, 0.2)], False),
    ],
)
def test_the_claim_holds_and_fails(cells, holds, monkeypatch, tmp_path):
    finding = reproduce("loss-scale", cells, monkeypatch, tmp_path)
    assert finding.holds is holds
    assert "patches.weight (24), image_blocks.2.mlp.norm.bias (6)" in finding.verdict or cells[0]["overflows"] is LATE


def test_shares_and_names():
    assert early_share({"overflows": EARLY}) == 0.8 and math.isnan(early_share({"overflows": {}}))
    assert most_overflows(Runs("", {}, [{"overflows": {}}]), 3) == "none"
