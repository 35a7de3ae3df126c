"""The nearest real picture is the one with the least squared error; variants share a family."""

import json

import numpy as np
import pytest
import torch

from limner.evaluation.nearest_neighbor import Gallery, evaluate, mosaic, save
from tiny import WORDS, tiny_pipe


@pytest.fixture
def gallery():
    pictures = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (6, 3, 24, 24), dtype=np.uint8))
    return Gallery(
        pictures,
        [WORDS[0], WORDS[1], "a", "b", "c", "d"],
        ["k0", "k1", "k2", "k3", "k4", "k5"],
        ["f0", "f1", "f0", "f3", "f4", "f1"],
        ["train", "held-out", "train", "train", "train", "train"],
    )


def test_nearest_is_least_squared_error(gallery):
    drawn = (gallery.pictures.int() + torch.randint(-60, 60, gallery.pictures.shape)).clamp(0, 255).to(torch.uint8)
    error = (drawn[:, None].float() - gallery.pictures[None].float()).square().flatten(2).mean(2)
    assert torch.equal(gallery.nearest(drawn), error.argmin(1))
    assert torch.equal(gallery.nearest(gallery.pictures), torch.arange(6))


def test_choosing_is_by_split_and_seed(gallery):
    assert gallery.choose("held-out") == [1]
    assert gallery.choose("train") == [0, 2, 3, 4, 5]
    assert gallery.choose("train", 3, seed=1) == gallery.choose("train", 3, seed=1)
    assert gallery.choose("nothing") == []


def test_right_and_related_are_counted(gallery, tmp_path):
    pipe = tiny_pipe()
    made = pipe(WORDS[0], candidates=3, seed=0)[0]
    picture = torch.from_numpy(np.array(made.image)).permute(2, 0, 1)
    gallery.pictures[2] = picture  # of the family of 0, but not 0
    made = pipe(WORDS[1], candidates=3, seed=0)[0]
    gallery.pictures[1] = torch.from_numpy(np.array(made.image)).permute(2, 0, 1)
    trained = evaluate(pipe, gallery, "train", n=None, candidates=3, seed=0)
    assert trained.found[0] == 2
    assert (bool(trained.right[0]), bool(trained.related[0])) == (False, True)
    held_out = evaluate(pipe, gallery, "held-out", candidates=3, seed=0)
    exact, family = held_out.rates()
    assert (exact.right, exact.total, family.right) == (1, 1, 1)
    save(tmp_path / "r.json", gallery, [trained, held_out])
    written = json.loads((tmp_path / "r.json").read_text())
    assert [part["split"] for part in written] == ["train", "held-out"]
    assert written[1]["right"]["rate"] == 1.0
    assert "best of 3" in trained.table()
    again = evaluate(pipe, gallery, "held-out", candidates=3, repeats=5, seed=0)
    assert again.wanted == [1] * 5
    assert again.rates()[0].total == 5
    assert not torch.equal(again.pictures[0], again.pictures[1])  # drawn anew
    assert "1 captions of 1 families, drawn 5 times" in again.table()
    assert again.rates()[0].high - again.rates()[0].low > 0.5  # one family says little of others
    assert mosaic(gallery, trained, n=5, columns=3).size == (3 * 56, 2 * 32)
