"""Variants of the prior equal their definitions; criteria can hold and can fail."""

from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F

from limner.attention.attention import attention_mask
from limner.attention.patterns import PATTERNS
from limner.experiments import prior_variants, tiny_models
from limner.experiments.prior_variants import (
    LastLayerConfig,
    MaskedPadding,
    SampledTokens,
    SeparateSoftmax,
    SeparateSoftmaxes,
    SoftTargets,
)
from limner.models.patch_dvae import PatchDVAEConfig
from limner.models.transformer import Transformer, TransformerConfig
from limner.objectives.autoregressive import Autoregressive
from limner.text import PAD
from toy_sweeps import reproduce

MODEL = TransformerConfig(text_vocab=20, image_vocab=16, text_len=5, grid=(3, 3), width=16, depth=3, heads=2, kernel=3)
TEXT = torch.tensor([[3, 4, 5, PAD, PAD], [7, 2, 9, 4, 1]])
IMAGE = torch.arange(18).view(2, 9) % 16


def build(config, kind=Transformer):
    torch.manual_seed(0)
    return kind(config)


def test_masked_padding_hides_padding_only():
    ordinary, masked = build(MODEL), build(MODEL, MaskedPadding)

    def image_losses():
        """In training, and by the model's logits."""
        batch = {"text": TEXT, "image": IMAGE}
        by_objective = [Autoregressive()(model, batch, 0, None)[1]["image"] for model in (masked, ordinary)]
        by_logits = [F.cross_entropy(model(TEXT, IMAGE)[1].mT, IMAGE) for model in (masked, ordinary)]
        torch.testing.assert_close(by_objective, by_logits)
        return by_objective

    torch.testing.assert_close(masked(TEXT, IMAGE)[1][1], ordinary(TEXT, IMAGE)[1][1])  # a caption without padding
    before = image_losses()
    for model in (masked, ordinary):
        torch.nn.init.normal_(model.embed.padding.weight, std=9)
    after = image_losses()
    torch.testing.assert_close(after[0], before[0])
    assert (after[1] - before[1]).abs() > 1e-4


@pytest.mark.parametrize("name", PATTERNS)
def test_separate_softmaxes_add(name):
    pattern = PATTERNS[name]((3, 4), 3)
    q, k, v = torch.randn(3, 2, 2, 18, 8, generator=torch.Generator().manual_seed(0)).unbind()
    scores = (q @ k.mT / 8**0.5).masked_fill(~attention_mask(pattern, 6), -torch.inf)
    weights = torch.cat([scores[..., :6].softmax(-1), scores[..., 6:].softmax(-1).nan_to_num()], -1)
    torch.testing.assert_close(SeparateSoftmax(pattern, 6)(q, k, v), weights @ v)


def test_separate_softmaxes_are_in_all_layers():
    model = build(MODEL, SeparateSoftmaxes)
    assert {type(fn) for fn in model.attention_fns.values()} == {SeparateSoftmax}
    model(TEXT, IMAGE)[1].sum().backward()


@pytest.mark.parametrize("last", PATTERNS)
def test_only_the_last_layer_changes(last):
    config = LastLayerConfig(**asdict(replace(MODEL, depth=4)), last=last)
    assert [pattern.name for pattern in config.patterns] == ["row", "column", "row", last]
    assert build(config)(TEXT, IMAGE)[1].shape == (2, 9, 16)


def test_certain_q_gives_the_ordinary_loss():
    model, q = build(MODEL), torch.nn.functional.one_hot(IMAGE, 16).float()
    batch, generator = {"text": TEXT, "image": IMAGE, "q": q}, torch.Generator().manual_seed(0)
    loss, metrics = Autoregressive(text_weight=0.25)(model, batch, 0, None)
    for objective in (SampledTokens(text_weight=0.25), SoftTargets(text_weight=0.25)):
        other, others = objective(model, batch, 0, generator)
        torch.testing.assert_close(other, loss)
        torch.testing.assert_close(others, metrics)


def test_soft_targets_are_the_mean_over_targets():
    model, q = build(MODEL), torch.full((2, 9, 16), 1 / 16)
    torch.nn.init.zeros_(model.head.image.weight)  # logits do not depend on the sampled inputs
    torch.nn.init.normal_(model.head.image.bias)
    image = SoftTargets()(model, {"text": TEXT, "q": q}, 0, None)[1]["image"]
    torch.testing.assert_close(image, -model.head.image.bias.log_softmax(0).mean())


def test_samples_have_the_nearest_code_as_likeliest(monkeypatch):
    dvae = PatchDVAEConfig(size=24, vocab=16).build()
    dvae.codes.copy_(torch.rand(16, 48, generator=torch.Generator().manual_seed(0)))
    monkeypatch.setattr(tiny_models, "patch_dvae", lambda: dvae)
    samples = prior_variants.samples.__wrapped__(8, 0)
    torch.testing.assert_close(samples["q"].sum(-1), torch.ones(8, 36))
    assert torch.equal(samples["image"], dvae.tokenize(tiny_models.scenes(8, 0)[0]))


def test_unusual_captions_are_shorter_or_shuffled():
    usual, unusual = tiny_models.scenes(prior_variants.HELD_OUT, 1)[1], prior_variants.unusual_captions()
    lengths = {name: (text != PAD).sum(1) for name, text in {"usual": usual, **unusual}.items()}
    assert lengths["terse"].float().mean() < lengths["usual"].float().mean() - 3
    assert (lengths["shuffled"] - lengths["usual"]).abs().max() <= 4
    assert (unusual["shuffled"] != usual).any(1).float().mean() > 0.99


def cell(image=1.0, terse=1.0, shuffled=1.0):
    return {"image": image, "terse": terse, "shuffled": shuffled, "text": 1.0, "sampled": 1.0, "loss": [1.0] * 300}


@pytest.mark.parametrize(
    ("name", "cells", "holds"),
    [
        ("padding", [cell(), cell(0.9, 1.1, 1.1)], True),
        ("padding", [cell(), cell(0.9, 1.1, 0.9)], False),
        ("padding", [cell(), cell(1.1, 1.1, 1.1)], False),
        ("padding", [cell(), cell(0.9, 1.1)], None),
        ("separate-softmax", [cell(), cell(1.1)], True),
        ("separate-softmax", [cell(), cell(0.9)], False),
        ("last-layer", [cell(), cell(1.1), cell(1.1)], True),
        ("last-layer", [cell(), cell(1.1), cell(0.9)], False),
        ("soft-targets", [cell(), cell(0.9), cell(0.8)], True),
        ("soft-targets", [cell(), cell(0.9), cell(1.1)], False),
        ("loss-weights", [cell(), cell(1.1), cell(1.2)], True),
        ("loss-weights", [cell(), cell(0.9), cell(1.2)], False),
    ],
)
def test_claims_hold_and_fail(name, cells, holds, monkeypatch, tmp_path):
    monkeypatch.setattr(prior_variants, "samples", lambda count, seed: {"q": torch.full((1, 2, 4), 0.25)})
    assert reproduce(name, cells, monkeypatch, tmp_path).holds is holds
