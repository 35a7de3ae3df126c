"""The codes of signs show every sign; outcomes are distinguished; the claim can hold and can fail."""

import pytest
import torch

from limner.experiments import written_words
from limner.experiments.written_words import outcomes, patch_codes, training_signs, word_lists
from limner.tasks.signs import read_sign
from limner.text.bpe import Tokenizer
from toy_sweeps import reproduce


def test_new_words_are_not_in_training_and_codes_show_every_sign():
    known, new = word_lists(100)
    signs, pictures = training_signs(100, 1_024)
    assert len(set(known) | set(new)) == 200 and {sign.word for sign in signs} <= set(known)
    dvae = patch_codes(pictures)
    shown = dvae.decode_tokens(dvae.tokenize(pictures[:64]))
    assert [read_sign(picture.movedim(0, -1).numpy()) for picture in shown] == signs[:64]


def test_outcomes_are_told_apart(monkeypatch):
    known, new = word_lists(100)
    signs, pictures = training_signs(100, 1_024)
    dvae, tokenizer = patch_codes(pictures), Tokenizer.train([sign.caption for sign in signs], 400)
    tokens = dvae.tokenize(pictures[:4])
    tokens[3, 0] = (tokens[3, 0] + 60) % 128  # half of another letter, or of none
    monkeypatch.setattr(written_words, "sample_sign", lambda rng, words: asked[words[0]])
    monkeypatch.setattr(written_words, "generate", lambda *args, **_: type("Sampled", (), {"tokens": tokens[:, None]}))
    asked = {str(i): sign for i, sign in enumerate([signs[0], signs[1], signs[2]._replace(word=new[0]), signs[3]])}
    model = torch.nn.Module()
    assert outcomes(model, dvae, tokenizer, known, list(asked), 0) == {
        "right": 0.5, "copied": 0.25, "unreadable": 0.25
    }  # fmt: skip


def result(right):
    shares = {"right": right, "copied": 0.1, "unreadable": 0.0}
    return {"loss": [1.0], **{f"{kind} {outcome}": x for kind in ("known", "new") for outcome, x in shares.items()}}


@pytest.mark.parametrize(("right", "holds"), [(0.8, True), (0.3, False)])
def test_the_claim_holds_and_fails(right, holds, monkeypatch, tmp_path):
    found = reproduce("written-words", [result(right), result(0.1)], monkeypatch, tmp_path)
    assert found.holds is holds
    assert f"{right:.1%}" in found.verdict and "10.0%" in found.verdict
