"""A picture that the prior follows: what is added, who sees it, and that the loss teaches it."""

import pytest
import torch

from limner.errors import UserError
from limner.models.transformer import TransformerConfig
from limner.objectives.autoregressive import Autoregressive
from limner.optim.optimizers import AdamWConfig
from limner.text import PAD
from tiny import tiny_pipe

S = 12


def prior(blocks=1, **settings):
    torch.manual_seed(0)
    sizes = {"text_vocab": 20, "image_vocab": 16, "text_len": 4, "grid": (3, 4), "width": 32, "depth": 2, "heads": 2}
    return TransformerConfig(**sizes, condition_blocks=blocks, **settings).build()


def batch(n=3):
    torch.manual_seed(1)
    return {
        "text": torch.randint(0, 20, (n, 4)), "image": torch.randint(0, 16, (n, S)),
        "given": torch.randint(0, 16, (n, S)),
    }  # fmt: skip


def test_without_a_picture_nothing_is_added():
    model, b = prior(), batch()
    padding = torch.full_like(b["given"], PAD)
    with_padding = model(torch.cat([b["text"], padding], 1), b["image"])
    for a, x in zip(model(b["text"], b["image"]), with_padding, strict=True):
        assert torch.equal(a, x)


def test_each_token_is_predicted_from_the_whole_picture_but_captions_are_not():
    model, b = prior(), batch()
    with torch.no_grad():
        model.embed.condition.out.weight.normal_()
    text, image = model(torch.cat([b["text"], b["given"]], 1), b["image"])
    for s in range(S):
        changed = b["given"].clone()
        changed[:, s] = (changed[:, s] + 1) % 16
        other_text, other = model(torch.cat([b["text"], changed], 1), b["image"])
        assert torch.equal(text, other_text)
        assert ((image - other).abs().amax((0, 2)) > 1e-6).all()


def test_what_is_added_at_a_place_is_added_where_its_token_is_predicted():
    model, b = prior(), batch()
    x, before = (model.inputs(text, b["image"]) for text in (torch.cat([b["text"], b["given"]], 1), b["text"]))
    added, given = x - before, model.embed.given(b["given"])
    torch.testing.assert_close(added[:, 4:-1], given)  # START predicts the first token
    assert not added[:, :4].any() and not added[:, -1].any()


def test_a_prior_learns_to_copy_the_picture():
    model, objective = prior(), Autoregressive(text_weight=0.0)
    (optimizer,) = AdamWConfig(lr=5e-3).build(model)
    for step in range(150):
        torch.manual_seed(step)
        b = {"text": torch.full((16, 4), PAD), "image": torch.randint(0, 16, (16, S))}
        loss, metrics = objective(model, b | {"given": b["image"]}, step, None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert metrics["image"] < 0.5
    without = objective(model, b, 0, None)[1]["image"]
    assert without > 2.0  # the tokens are uniform: ln 16 = 2.8


def test_a_pipeline_takes_a_picture_only_if_its_model_does():
    pipe = tiny_pipe()
    picture = pipe("a small red circle", candidates=1)[0].image
    with pytest.raises(UserError, match="this model takes captions alone"):
        pipe("a large blue square", candidates=2, prompt_tokens=pipe.like(picture))
    conditioned = tiny_pipe(condition_blocks=1)
    with torch.no_grad():
        conditioned.prior.embed.condition.out.weight.normal_()
    alone = conditioned("a large blue square", candidates=2, n=2)
    like = conditioned("a large blue square", candidates=2, n=2, prompt_tokens=conditioned.like(picture))
    assert [d.image.tobytes() for d in alone] != [d.image.tobytes() for d in like]
    both = conditioned.candidates(
        ["a large blue square"] * 2, 2, seed=0, prompt_tokens=[conditioned.like(picture)[0], None]
    )
    assert {d.image.tobytes() for d in like} == {
        picture.permute(1, 2, 0).numpy().tobytes() for picture in both.pictures[0]
    }
    assert {d.image.tobytes() for d in alone} == {
        picture.permute(1, 2, 0).numpy().tobytes() for picture in both.pictures[1]
    }
