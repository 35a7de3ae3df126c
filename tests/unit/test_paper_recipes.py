"""Settings that the recipes of the papers take from their papers."""

import pytest

from limner import recipes
from limner.objectives.autoregressive import Autoregressive
from limner.recipes.presets import paper

SIZES = ("tiny", "small", "base", "large", "xl", "dalle-3b", "dalle-6b", "dalle-12b")
SMALL = ("scenes", "demo", "emoji", "icons", "laptop", "photos")


def test_operands_of_logits_are_in_32_bits_in_the_papers_recipes_alone():
    assert {paper(size).prior.objective for size in SIZES} == {Autoregressive()}
    assert Autoregressive().logit_operands == "fp32"
    assert {recipes.get(name).prior.objective.logit_operands for name in SMALL} == {"autocast"}
