"""The demonstration trains for as many steps as the machine has time for, and remembers how many."""

import pytest

from limner.recipes import demo, presets
from limner.recipes.demo import paced


@pytest.mark.parametrize(("seconds", "prior", "contrastive"), [(0.01, 3_000, 1_000), (1.0, 240, 240), (1e4, 1, 1)])
def test_steps_are_those_of_the_recipe_or_what_fits(tmp_path, monkeypatch, seconds, prior, contrastive):
    monkeypatch.setattr(demo, "seconds_a_step", lambda *_: seconds)
    monkeypatch.setattr(demo, "_TRAINING", 300)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    monkeypatch.setattr("torch.set_num_threads", lambda n: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    recipe = paced(presets.demo(), tmp_path)
    assert (recipe.prior.training.steps, recipe.contrastive.training.steps) == (prior, contrastive)
    monkeypatch.setattr(demo, "seconds_a_step", lambda *_: 5 * seconds)
    assert paced(presets.demo(), tmp_path) == recipe


def test_a_step_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    recipe = paced(presets.demo(), tmp_path)
    assert 1 <= recipe.contrastive.training.steps <= 1_000
    assert 1 <= recipe.prior.training.steps <= 3_000
