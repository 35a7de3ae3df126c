"""The layers that Figure 6 times, and the sections that experiments cite."""

from pathlib import Path

import pytest

from limner.evaluation.confidence import Estimate
from limner.experiments import load, switchback_speed
from limner.experiments.eight_bits import as_accurate


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
        "switchback-accuracy": "Wortsman et al. 2023, §2.2, Figure 1",
        "fp8-layerscale": "Wortsman et al. 2023, §2.3, Figure 2",
        "switchback-speed": "Wortsman et al. 2023, App. B, Figures 6 and 7 (left)",
    }


@pytest.mark.parametrize(
    ("gain", "lead", "holds"), [(0.0, 0.02, True), (0.02, 0.02, True), (-0.02, 0.02, False), (0.0, 0.0, None),
    (0.0, -0.02, False)],
)  # fmt: skip
def test_switchback_must_be_as_accurate_as_bf16_and_more_than_llm_int8(gain, lead, holds):
    estimates = (Estimate(value=x, low=x - 0.01, high=x + 0.01) for x in (gain, lead))
    assert as_accurate(*estimates) is holds
