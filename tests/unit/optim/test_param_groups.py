import torch
from torch import nn

from limner.models.contrastive import CLIPConfig
from limner.optim.param_groups import parameter_groups


class Net(nn.Module):
    no_weight_decay = ("positions",)

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.positions = nn.Parameter(torch.zeros(3, 4))
        self.dense = nn.Linear(4, 4)
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.table.weight  # tied
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def test_only_matrices_decay_and_every_parameter_is_in_one_group() -> None:
    model = Net()
    decayed, exempt = parameter_groups(model, 0.1)
    assert [p.shape for p in decayed["params"]] == [(4, 4), (2, 1, 3, 3)]
    assert decayed["weight_decay"] == 0.1 and exempt["weight_decay"] == 0
    grouped = {id(p) for p in (*decayed["params"], *exempt["params"])}
    assert grouped == {id(p) for p in model.parameters() if p.requires_grad}
    assert len(grouped) == len(decayed["params"]) + len(exempt["params"])


def test_all_decays_everything() -> None:
    model = Net()
    (group,) = parameter_groups(model, 0.1, "all")
    assert len(group["params"]) == sum(p.requires_grad for p in model.parameters())


def test_learned_positions_of_patches_decay_only_in_scope_all() -> None:
    model = CLIPConfig(text_vocab=9, text_len=4, size=8, patch=4, width=8, depth=1, heads=2, embedding=4).build()
    decayed, exempt = parameter_groups(model, 0.1)
    in_group = [any(p is model.image_position for p in group["params"]) for group in (decayed, exempt)]
    assert in_group == [False, True]
    (group,) = parameter_groups(model, 0.1, "all")
    assert any(p is model.image_position for p in group["params"])
