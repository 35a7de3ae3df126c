"""The layers that Figure 6 times, and the sections that experiments cite."""

import math
from pathlib import Path

import pytest

from limner.experiments import load, switchback_speed


def test_both_layers_of_an_mlp_are_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shapes = {"steps": [], "layers": []}
    steps, layers = switchback_speed.switchback_steps, switchback_speed.linear_layers

    def once(functions, rounds):
        calls = [function() for function in functions.values()]
        assert all(len(results) == 2 for results in calls)  # of the layers
        return {name: [1.0] for name in functions}

    def noting_steps(x, weight, g):
        shapes["steps"].append(tuple(weight.shape))
        return steps(x, weight, g)

    def noting_layers(x, g, kinds):
        shapes["layers"].append((g.shape[1], x.shape[1]))
        return layers(x, g, kinds)

    for name, function in (("time_rounds", once), ("switchback_steps", noting_steps), ("linear_layers", noting_layers)):
        monkeypatch.setattr(switchback_speed, name, function)
    load("switchback-speed").reproduce(tmp_path, True)
    assert shapes["steps"] == shapes["layers"] == [(256, 64), (64, 256), (512, 128), (128, 512)]


def test_sections_of_the_second_paper() -> None:
    """SwitchBack's results are in 2.2.3, float8 by small features is 2.3; speed per layer is Figures 6 and 7."""
    sources = {name: load(name).source for name in ("switchback-accuracy", "fp8-layerscale", "switchback-speed")}
    assert sources == {
        "switchback-accuracy": "Wortsman et al. 2023, §2.2, Figures 1 (left) and 9",
        "fp8-layerscale": "Wortsman et al. 2023, §2.3, Figures 2 and 11",
        "switchback-speed": "Wortsman et al. 2023, App. B, Figures 6 and 7 (left)",
    }


@pytest.mark.parametrize(
    ("speedups", "holds"),
    [({64: 1.2, 32: 1.1}, True), ({64: 1.2, 32: 1.3}, False), ({64: 0.9, 32: 0.8}, False)],
)
def test_training_must_be_faster_and_more_so_in_larger_models(speedups, holds, monkeypatch, tmp_path):
    def times(functions, rounds):
        assert set(functions) == set(switchback_speed.TRAINING)
        for function in functions.values():
            assert math.isfinite(function()["loss"].item())
        (width,) = {function.args[0].model.config.width for function in functions.values()}
        return {name: [1.0 if name == "SwitchBack" else speedups[width]] * 2 for name in functions}

    monkeypatch.setattr(switchback_speed, "time_rounds", times)
    finding = load("switchback-training").reproduce(tmp_path, True)
    assert finding.holds is holds and len(finding.rows) == 2 * len(switchback_speed.TRAINING)
