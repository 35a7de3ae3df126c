"""Precisions of a recipe: their names in JSON, and the layers they change."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from limner.cli import main
from limner.config import from_dict, to_dict
from limner.errors import UserError
from limner.models.contrastive import CLIPConfig
from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Auto
from limner.quantization.low_precision import LowPrecisionLinear
from limner.quantization.precisions import Fp8SwitchBack, Fp8TensorWise, LLMInt8, SwitchBack, SwitchBackM, SwitchBackQ
from limner.recipes import get
from limner.recipes.recipe import Recipe
from limner.training.config import TrainConfig

NAMES = {
    "switchback": SwitchBack, "switchbackm": SwitchBackM, "switchbackq": SwitchBackQ, "llmint8": LLMInt8,
    "fp8switchback": Fp8SwitchBack, "fp8tensorwise": Fp8TensorWise,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_names_it_in_one_word(name):
    config = TrainConfig(steps=1, precision=NAMES[name]())
    assert to_dict(config)["precision"] == name
    assert from_dict(TrainConfig, to_dict(config)) == config
    assert config.precision.dtype("cpu") == Auto().dtype("cpu")


def test_an_unknown_name_lists_the_known_ones(capsys):
    with pytest.raises(UserError, match=r"precision cannot be 'switchbak': choose 'auto'.*did you mean 'switchback'"):
        from_dict(TrainConfig, {"steps": 1, "precision": "switchbak"})
    argv = ["train", "data", "--out", "run", "--recipe", "demo", "--prior.training.precision", "int8"]
    assert main(argv) == 2
    output = capsys.readouterr().err
    assert all(name in output for name in ("auto", "bf16", "fp32", *NAMES))


def test_a_dvae_has_no_blocks_to_convert():
    recipe = get("scenes")
    with pytest.raises(ValueError, match="training.precision must be auto, bf16, fp16 or fp32"):
        replace(recipe.dvae, training=replace(recipe.dvae.training, precision=SwitchBack()))
    described = to_dict(recipe)
    described["dvae"]["training"]["precision"] = "llmint8"
    with pytest.raises(UserError, match=r"dvae.training.precision must be auto"):
        from_dict(Recipe, described)


@pytest.mark.parametrize("precision", NAMES.values())
def test_all_linear_layers_of_the_blocks_change_and_no_others(precision):
    prior = TransformerConfig(text_vocab=9, image_vocab=9, text_len=3, grid=(2, 2), width=16, depth=2, heads=2)
    towers = CLIPConfig(text_vocab=9, text_len=4, size=8, patch=4, width=16, depth=2, heads=2, embedding=8)
    for config, blocks, rest in ((prior, 2, {"head.text", "head.image"}), (towers, 4, {"image_out", "text_out"})):
        model = config.build()
        names = list(model.state_dict())
        assert precision().apply(model) is model
        kinds = {name: type(module) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        assert {name for name, kind in kinds.items() if kind is nn.Linear} == rest
        changed = [kind for kind in kinds.values() if kind is precision.layer]
        assert len(changed) == 4 * blocks == len(kinds) - len(rest) and issubclass(precision.layer, LowPrecisionLinear)
        assert list(model.state_dict()) == names
    with pytest.raises(ValueError, match="no linear layer"):
        precision().apply(nn.Sequential(nn.Linear(2, 2)))
    with torch.device("meta"):
        precision().apply(prior.build())
