"""Each optimizer takes every trainable parameter once and follows the schedule group by group."""

import json
from typing import get_args

import pytest
import torch
from torch import nn

from limner.config import from_dict, to_dict
from limner.errors import UserError
from limner.models.transformer import TransformerConfig
from limner.optim.optimizers import (
    AdamW16Config,
    AdamWConfig,
    Beta2WarmupAdamWConfig,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    StableAdamWConfig,
)
from limner.training.config import TrainConfig


def prior() -> nn.Module:
    torch.manual_seed(0)
    return TransformerConfig(text_vocab=9, image_vocab=8, text_len=3, grid=(2, 2), width=8, depth=2, heads=2).build()


CONFIGS: list[OptimizerConfig] = [kind() for kind in get_args(OptimizerConfig)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_every_parameter_has_one_owner(config: OptimizerConfig) -> None:
    model = prior()
    model.embed.row.weight.requires_grad_(False)
    owned = [p for o in config.build(model) for group in o.param_groups for p in group["params"]]
    assert len(owned) == len(set(owned))
    assert set(owned) == {p for p in model.parameters() if p.requires_grad}


def test_muon_takes_the_matrices_of_the_blocks_and_makes_orthogonal_updates() -> None:
    model = prior()
    config = MuonConfig(lr=0.1, weight_decay=0.0, fallback_adamw=AdamWConfig(lr=0.3))
    muon, adam = config.build(model)
    names = {p: name for name, p in model.named_parameters()}
    assert {names[p] for p in muon.param_groups[0]["params"]} == {
        f"blocks.{i}.{part}.weight"
        for i in range(2)
        for part in (
            "attention.branch.qkv",
            "attention.branch.out",
            "mlp.branch.up",
            "mlp.branch.down",
        )
    }
    assert muon.param_groups[0]["initial_lr"] == 0.1
    assert {group["initial_lr"] for group in adam.param_groups} == {0.3}
    weight = model.get_parameter("blocks.0.attention.branch.out.weight")
    before, weight.grad = weight.detach().clone(), torch.randn_like(weight)
    muon.step()
    sizes = torch.linalg.svdvals((before - weight.detach()) / 0.1)
    assert float(sizes.min()) > 0.5 and float(sizes.max()) < 1.5  # Newton-Schulz approximates the factorization


@pytest.mark.parametrize("config", [MuonConfig(), AdamW16Config()])
def test_optimizers_of_blocks_reject_models_without_blocks(config: MuonConfig | AdamW16Config) -> None:
    with pytest.raises(ValueError, match="needs a model with blocks"):
        config.build(nn.Linear(2, 2))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_settings_reach_the_parameter_groups(config: OptimizerConfig) -> None:
    for optimizer in config.build(prior()):
        for group in optimizer.param_groups:
            expected = config.fallback_adamw if isinstance(config, MuonConfig) and "betas" in group else config
            assert group["lr"] == group["initial_lr"] == expected.lr
            assert group["weight_decay"] in (0.0, expected.weight_decay)
            for name in ("betas", "eps", "max_exp_avg_sq", "power", "clip_decay"):
                assert group.get(name) == getattr(expected, name, group.get(name))
    if isinstance(config, Beta2WarmupAdamWConfig):
        assert config.build(prior())[0].param_groups[0]["betas"] == (config.beta1,)


def test_only_matrices_of_blocks_have_moments_in_16_bits() -> None:
    """Gains, biases, embeddings and output layers stay in fp32 (App. D.2)."""
    model = prior()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    (optimizer,) = AdamW16Config(decay_scope="all").build(model)
    optimizer.step()
    quantized = {n for n, p in model.named_parameters() if optimizer.state[p]["exp_avg"].dtype == torch.int16}
    ends = ("qkv.weight", "out.weight", "up.weight", "down.weight")
    assert quantized == {n for n, p in model.named_parameters() if n.startswith("blocks.") and n.endswith(ends)}
    assert all(group["weight_decay"] == AdamW16Config().weight_decay for group in optimizer.param_groups)


@pytest.mark.parametrize(
    "config", [*CONFIGS, StableAdamWConfig(clip_decay=False, lr=1e-3), LionConfig(betas=(0.95, 0.98))]
)
def test_json_names_the_optimizer(config: OptimizerConfig) -> None:
    training = TrainConfig(steps=1, optimizer=config)
    data = json.loads(json.dumps(to_dict(training)))
    assert data["optimizer"]["type"] == type(config).__name__.removesuffix("Config")
    assert from_dict(TrainConfig, data) == training
    data["optimizer"]["type"] = "Adagrad"
    with pytest.raises(UserError, match=r"optimizer.type cannot be 'Adagrad': choose 'AdamW', 'Muon', .*'Lion'"):
        from_dict(TrainConfig, data)
