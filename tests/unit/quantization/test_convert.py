"""Layers are changed from outside, all that were chosen or none."""

import copy
import re
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from limner.models.contrastive import CLIPConfig
from limner.quantization import SwitchBackLinear
from limner.quantization.convert import convert


class Twice(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, x):
        return x @ self.weight.T * 2


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))).eval()


def kinds(module):
    return [type(m).__name__ for m in module.modules() if not isinstance(m, nn.Sequential)]


def test_all_layers_or_those_that_are_chosen_by_name_and_shape():
    assert kinds(convert(model(), Twice)) == ["Twice", "LayerNorm", "Twice", "Twice"]
    some = convert(model(), Twice, lambda name, layer: name.startswith("2.") and layer.out_features == 4)
    assert kinds(some) == ["Linear", "LayerNorm", "Twice", "Linear"]
    assert not some[2][0].training
    assert some[2][0].weight is some.get_parameter("2.0.weight")
    x = torch.randn(5, 4)
    torch.testing.assert_close(some[2][0](x), 2 * nn.functional.linear(x, some[2][0].weight))


def test_blocks_of_a_model_alone():
    tower = CLIPConfig(text_vocab=9, text_len=4, size=8, patch=4, width=16, depth=2, heads=2, embedding=8).build()
    convert(tower, Twice, lambda name, layer: "_blocks." in name)
    assert sum(isinstance(m, Twice) for m in tower.modules()) == 2 * 2 * 4
    assert {name for name, m in tower.named_modules() if isinstance(m, nn.Linear)} == {"image_out", "text_out"}


def tied():
    net = model()
    net[2][0].weight = net[2][1].weight = nn.Parameter(torch.randn(4, 4))
    return net


def shared():
    net = model()
    net.again = net[2][0]
    return net


def embedded():
    net = model()
    net.table = nn.Embedding(2, 4)
    net.table.weight = net[2][1].weight
    return net


def parametrized():
    net = model()
    weight_norm(net[2][0])
    return net


def watched(register):
    def net():
        net = model()
        getattr(net[2][1], register)(lambda *_: None)
        return net

    return net


@pytest.mark.parametrize(
    ("net", "where", "error"),
    [
        (model, lambda name, layer: name == "blocks", "selects no linear layer of the Sequential"),
        (model, lambda name, layer: layer.out_features == 99, "selects no linear layer"),
        (tied, lambda name, layer: True, "2.0 or its weight is used in several places"),
        (shared, lambda name, layer: True, "2.0 or its weight is used in several places"),
        (shared, lambda name, layer: name == "again", "again or its weight is used in several places"),
        (embedded, lambda name, layer: True, "2.1 or its weight is used in several places"),
        (parametrized, lambda name, layer: True, "2.0 is a ParametrizedLinear, not an nn.Linear: .* where="),
        *(
            (watched(f"register_{kind}_hook"), lambda name, layer: True, "2.1 has hooks.*: convert before adding hooks")
            for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre")
        ),
    ],
)
def test_invalid_conversions_raise_and_change_nothing(net, where, error):
    net = net()
    before = [id(m) for m in net.modules()]
    with pytest.raises(ValueError, match=error):
        convert(net, Twice, where)
    assert [id(m) for m in net.modules()] == before


def test_converted_layers_are_not_converted_again():
    once = convert(model(), Twice)
    with pytest.raises(ValueError, match="no linear layer"):
        convert(copy.deepcopy(once), Twice)


def test_a_model_that_is_a_layer_has_nobody_to_hold_another():
    with pytest.raises(ValueError, match="no linear layer"):
        convert(nn.Linear(2, 2), Twice)


class GPT(nn.Module):
    """Named as nanoGPT is."""

    def __init__(self):
        super().__init__()

        def block():
            return nn.ModuleDict(
                {
                    "attn": nn.ModuleDict({"c_attn": nn.Linear(16, 48), "c_proj": nn.Linear(16, 16)}),
                    "mlp": nn.ModuleDict({"c_fc": nn.Linear(16, 64), "c_proj": nn.Linear(64, 16)}),
                }
            )

        self.transformer = nn.ModuleDict({"wte": nn.Embedding(9, 16), "h": nn.ModuleList(block() for _ in range(2))})
        self.lm_head = nn.Linear(16, 9, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight


class CLIP(nn.Module):
    """Named as OpenCLIP is: a picture's tower within `visual`, the caption's next to it."""

    def __init__(self):
        super().__init__()

        def tower():
            def block():
                mlp = nn.Sequential(OrderedDict(c_fc=nn.Linear(16, 64), gelu=nn.GELU(), c_proj=nn.Linear(64, 16)))
                return nn.ModuleDict({"attn": nn.MultiheadAttention(16, 2, batch_first=True), "mlp": mlp})

            return nn.ModuleDict({"resblocks": nn.ModuleList(block() for _ in range(2))})

        self.visual = nn.ModuleDict({"transformer": tower()})
        self.transformer = tower()


def test_the_page_converts_nanogpt_and_openclip():
    page = (Path(__file__).parents[3] / "docs/guides/low-precision.md").read_text()
    lines = re.findall(r"^convert\((?:gpt|clip).*", page, re.MULTILINE)
    gpt, clip = GPT(), CLIP()
    for model, error in ((gpt, "lm_head or its weight.*where="), (clip, "attn.out_proj is a .*where=")):
        with pytest.raises(ValueError, match=error):
            convert(model, SwitchBackLinear.from_linear)
    exec("\n".join(lines), {"convert": convert, "SwitchBackLinear": SwitchBackLinear, "gpt": gpt, "clip": clip})
    for model, layers in ((gpt, 2 * 4), (clip, 2 * 2 * 2)):
        assert sum(isinstance(m, SwitchBackLinear) for m in model.modules()) == layers
