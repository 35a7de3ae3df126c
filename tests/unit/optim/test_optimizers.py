"""Each optimiser takes every trainable parameter once and follows the schedule group by group."""

import pytest
import torch
from torch import nn

from limner.models.transformer import TransformerConfig
from limner.optim.optimizers import AdamW, Muon


def prior() -> nn.Module:
    torch.manual_seed(0)
    return TransformerConfig(text_vocab=9, image_vocab=8, text_len=3, grid=(2, 2), width=8, depth=2, heads=2).build()


@pytest.mark.parametrize("config", [AdamW(), Muon()])
def test_every_parameter_has_one_owner(config: AdamW | Muon) -> None:
    model = prior()
    model.embed.row.weight.requires_grad_(False)
    owned = [p for o in config.build(model) for group in o.param_groups for p in group["params"]]
    assert len(owned) == len(set(owned))
    assert set(owned) == {p for p in model.parameters() if p.requires_grad}


def test_muon_takes_the_matrices_of_the_blocks_and_makes_orthogonal_updates() -> None:
    model = prior()
    config = Muon(lr=0.1, weight_decay=0.0, others=AdamW(lr=0.3))
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
    assert float(sizes.min()) > 0.5 and float(sizes.max()) < 1.5  # Newton-Schulz, not an exact factorisation


def test_muon_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match="blocks"):
        Muon().build(nn.Linear(2, 2))
