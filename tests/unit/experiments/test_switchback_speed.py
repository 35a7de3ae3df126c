"""The layers that Figure 6 times, and the sections that experiments cite."""

import pytest
import torch

from limner.experiments import load, switchback_speed


def test_both_layers_of_an_mlp_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each function takes as many seconds as its layer has outputs."""
    shapes = []

    def layers(x, g, kinds):
        shapes.append((x.shape, g.shape))
        return {"layer": lambda: g.shape[1]}

    monkeypatch.setattr(switchback_speed, "linear_layers", layers)
    monkeypatch.setattr(switchback_speed, "switchback_steps", lambda x, weight, g: {"step": lambda: weight.shape[0]})
    monkeypatch.setattr(switchback_speed, "int8_sums", lambda x, weight: {})
    monkeypatch.setattr(
        switchback_speed, "time_rounds", lambda functions, rounds: {k: [f()] * rounds for k, f in functions.items()}
    )
    steps, layers = switchback_speed.time_mlp(3, 16, 2, torch.device("cpu"))
    assert shapes == [((3, 16), (3, 64)), ((3, 64), (3, 16))]
    assert steps == {"step": [40, 40]} and layers == {"layer": [40, 40]}


def test_sections_of_the_second_paper() -> None:
    """SwitchBack's results are in 2.2.3, float8 by small features is 2.3; speed per layer is Figures 6 and 7."""
    sources = {name: load(name).source for name in ("switchback-accuracy", "fp8-layerscale", "switchback-speed")}
    assert sources == {
        "switchback-accuracy": "Wortsman et al. 2023, §2.2, Figure 1",
        "fp8-layerscale": "Wortsman et al. 2023, §2.3, Figure 2",
        "switchback-speed": "Wortsman et al. 2023, App. B, Figures 6 and 7 (left)",
    }
