"""Training refuses a step that cannot fit into memory; the estimate grows linearly with the samples."""

from dataclasses import replace

import pytest
import torch

from limner import recipes
from limner.errors import UserError
from limner.recipes.recipe import resolve
from limner.runs import memory_check
from limner.runs.memory_check import check_memory, saved_bytes
from tiny import tiny_recipe

STAGES = ("dvae", "prior", "contrastive")


@pytest.mark.parametrize("name", STAGES)
def test_saved_bytes_of_a_batch_follow_from_one_and_two_samples(name):
    recipe = resolve(tiny_recipe())
    one, two, seven = (
        saved_bytes(recipe, name, recipe.stages[name], samples, torch.device("cpu")) for samples in (1, 2, 7)
    )
    assert seven == pytest.approx(one + 6 * (two - one), rel=0.05)


@pytest.mark.parametrize("name", ["prior", "contrastive"])
def test_given_pictures_and_distractors_count(name):
    """Both double the tokens that blocks read, at least of some blocks."""
    plain = replace(tiny_recipe(), contrastive=replace(tiny_recipe().contrastive, distractors=0))
    prior = replace(plain.prior, model=replace(plain.prior.model, condition_blocks=2), related_by=("subject",))
    more = replace(plain, prior=prior, contrastive=replace(plain.contrastive, distractors=3))
    without, with_more = (
        saved_bytes(recipe, name, recipe.stages[name], 2, torch.device("cpu")) for recipe in map(resolve, (plain, more))
    )
    assert with_more > 1.2 * without


def test_a_batch_larger_than_the_memory_is_one_sentence_with_a_number_that_fits(monkeypatch):
    recipe = tiny_recipe()
    training = replace(recipe.prior.training, batch_size=64)
    large = resolve(replace(recipe, prior=replace(recipe.prior, training=training)))
    one, two = (saved_bytes(large, "prior", large.stages["prior"], n, torch.device("cpu")) for n in (1, 2))
    monkeypatch.setattr(memory_check, "_physical_memory", lambda: one + 20 * (two - one))
    with pytest.raises(UserError, match=r"64 samples of the prior .* --prior\.training\.accumulate (\d+)$") as caught:
        check_memory(large, STAGES)
    check_memory(large, ("dvae", "contrastive"))
    accumulate = int(str(caught.value).rsplit(" ", 1)[1])
    training = replace(training, accumulate=accumulate)
    check_memory(resolve(replace(recipe, prior=replace(recipe.prior, training=training))), STAGES)


@pytest.mark.slow
def test_the_papers_batch_of_pictures_does_not_fit_into_a_laptop(monkeypatch):
    monkeypatch.setattr(memory_check, "_physical_memory", lambda: 16e9)
    with pytest.raises(UserError, match=r"^512 samples of the dVAE need more than [\d,]+ GB"):
        check_memory(resolve(recipes.get("tiny")), ("dvae",))
