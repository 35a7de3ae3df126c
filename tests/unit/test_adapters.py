"""Adapters: the update that trains is the one that is merged, the file is PEFT's, and a bad one is one sentence."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from limner import adapters
from limner.adapters import LoRALinear, add_adapter, merge
from limner.cli import main
from limner.errors import UserError
from limner.pipeline import load
from tiny import WORDS, tiny_pipe

RANK, ALPHA = 2, 6


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return tiny_pipe().save_pretrained(tmp_path_factory.mktemp("bundles") / "tiny")


def trained(bundle):
    """The bundle's prior with an adapter whose factors are random, in numbers that half precision has."""
    prior = load(bundle).prior
    add_adapter(prior, RANK, ALPHA)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in prior.parameters():
            if p.requires_grad:
                p.copy_(torch.randn(p.shape, generator=generator).mul_(0.3).half())
    return prior


@pytest.fixture
def adapter(bundle, tmp_path):
    adapters.save(trained(bundle), tmp_path / "adapter", "tiny", bundle / "prior.safetensors")
    return tmp_path / "adapter"


def logits(prior):
    rng = np.random.default_rng(0)
    c = prior.config
    text = torch.from_numpy(rng.integers(0, c.text_vocab, (3, c.text_len)))
    image = torch.from_numpy(rng.integers(0, c.image_vocab, (3, c.grid[0] * c.grid[1])))
    with torch.no_grad():
        return prior(text, image)[1]


def test_a_new_adapter_changes_nothing_and_trains_alone(bundle):
    before = load(bundle).prior
    after = load(bundle).prior
    add_adapter(after, RANK, ALPHA)
    assert torch.equal(logits(before), logits(after))
    trains = {name for name, p in after.named_parameters() if p.requires_grad}
    assert trains == {name for name, _ in after.named_parameters() if "lora_" in name}
    assert before.state_dict().keys() == after.state_dict().keys() - trains
    numbers = sum(RANK * (x.in_features + x.out_features) for x in before.blocks.modules() if isinstance(x, nn.Linear))
    assert sum(p.numel() for p in after.parameters() if p.requires_grad) == numbers


def test_the_update_is_alpha_over_r_times_b_a():
    linear = nn.Linear(5, 3)
    layer = LoRALinear(linear, RANK, ALPHA)
    nn.init.normal_(layer.lora_B.weight)
    x = torch.randn(4, 5)
    expected = x @ (linear.weight + 3.0 * layer.lora_B.weight @ layer.lora_A.weight).T + linear.bias
    torch.testing.assert_close(layer(x), expected)


def test_a_merged_adapter_computes_what_the_trained_model_computes(bundle, adapter):
    merged, start = load(bundle, adapter=adapter), load(bundle)
    torch.testing.assert_close(logits(merged.prior), logits(trained(bundle)), rtol=1e-4, atol=1e-4)
    assert (logits(merged.prior) - logits(start.prior)).abs().max() > 0.1
    assert [type(m) for m in merged.prior.modules()] == [type(m) for m in start.prior.modules()]  # as fast


def test_the_files_are_those_of_peft(bundle, adapter):
    """By the rule of peft, which cannot be imported without transformers: its wrapper is `base_model.model`."""
    tensors, config = (
        load_file(adapter / "adapter_model.safetensors"),
        json.loads((adapter / "adapter_config.json").read_text()),
    )
    prior = load(bundle).prior
    expected = {}
    for name, layer in prior.named_modules():
        if name.startswith("blocks.") and isinstance(layer, nn.Linear):
            expected[f"base_model.model.{name}.lora_A.weight"] = (RANK, layer.in_features)
            expected[f"base_model.model.{name}.lora_B.weight"] = (layer.out_features, RANK)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["bias"]) == ("LORA", RANK, ALPHA, "none")
    assert config["target_modules"] == ["down", "out", "qkv", "up"]
    assert config["base_model_name_or_path"] == "tiny"


def test_an_adapter_of_peft_for_some_layers_in_fp32_is_read(bundle, tmp_path):
    prior = load(bundle).prior
    name, layer = "blocks.0.mlp.branch.up", prior.blocks[0].mlp.branch.up
    a, b = torch.randn(3, layer.in_features), torch.randn(layer.out_features, 3)
    save_file(
        {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b},
        tmp_path / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 12, "revision": None, "use_dora": False, "rank_pattern": {}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    expected = {key: value.clone() for key, value in prior.state_dict().items()}
    expected[f"{name}.weight"] += 4 * b @ a
    merge(prior, tmp_path, bundle / "prior.safetensors")
    for key, value in prior.state_dict().items():
        torch.testing.assert_close(value, expected[key])


def change_config(**settings):
    def change(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))

    return change


def change_tensors(change):
    def changed(folder):
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        first = next(iter(tensors))
        change(tensors, first)
        save_file(tensors, path)

    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "is not an adapter: it lacks adapter_config.json"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "is missing: the adapter is incomplete"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 99), "is damaged"),
        (change_config(revision="0" * 64), "belongs to another model than .*: it was trained on tiny"),
        (change_config(r=3), "rank 3 require"),
        (change_config(r=10**9), "r must be a whole number from 1 to"),
        (change_config(r=True), "r must be a whole number from 1 to"),
        (change_config(lora_alpha="6"), "lora_alpha must be a number"),
        (change_config(lora_alpha=1e300), "is not finite"),
        (change_config(peft_type="IA3"), "peft_type must be 'LORA'"),
        (change_config(peft_type=None), "peft_type must be 'LORA'"),
        (change_config(use_dora=True), "use_dora must be None or absent, not 'True'"),
        (change_config(rank_pattern={"up": 4}), "rank_pattern must be None"),
        (change_tensors(lambda t, key: t.update(x=t[key].clone())), "unknown tensor 'x'"),
        (change_tensors(lambda t, key: t.pop(key)), "lacks one of the two factors"),
        (change_tensors(lambda t, key: t.update({key: t[key][:, :1].clone()})), "has shape"),
        (change_tensors(lambda t, key: t.update({key: t[key].double()})), "is stored as F64"),
        (change_tensors(lambda t, key: t.update({key: t[key] * float("nan")})), "is not finite"),
        (change_tensors(lambda t, key: t.clear()), "has 0 tensors"),
    ],
)  # fmt: skip
def test_a_bad_adapter_is_one_sentence(bundle, adapter, change, message):
    change(adapter)
    with pytest.raises(UserError, match=message) as error:
        load(bundle, adapter=adapter)
    assert "\n" not in str(error.value)


def test_nothing_but_an_adapter_is_replaced(bundle, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not an adapter: name a new folder"):
        adapters.save(trained(bundle), tmp_path, "tiny", bundle / "prior.safetensors")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_draw_and_edit_take_an_adapter(bundle, adapter, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["--model", str(bundle), "--candidates", "2", "--scale", "1"]
    assert main(["draw", WORDS[0], *options, "-o", "start.png"]) == 0
    assert main(["draw", WORDS[0], *options, "--adapter", str(adapter), "-o", "adapted.png"]) == 0
    assert (tmp_path / "start.png").read_bytes() != (tmp_path / "adapted.png").read_bytes()
    edit = ["edit", "start.png", WORDS[0], *options, "--keep-rows", "1"]
    assert main([*edit, "--adapter", str(adapter), "-o", "edited.png"]) == 0
    assert main(["draw", WORDS[0], *options, "--adapter", str(adapter), "--engine", "onnx"]) == 2
    assert "ONNX files cannot take an adapter" in capsys.readouterr().err
