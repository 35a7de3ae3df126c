"""The nearest real picture has the least squared error; variants share a family."""

import json

import numpy as np
import pytest
import torch

from limner.evaluation.nearest_neighbor import ReferenceSet, evaluate, mosaic, nearest_picture
from tiny import WORDS, tiny_pipe


@pytest.fixture
def references():
    pictures = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (6, 3, 24, 24), dtype=np.uint8))
    return ReferenceSet(
        pictures,
        [WORDS[0], WORDS[1], "a", "b", "c", "d"],
        ["k0", "k1", "k2", "k3", "k4", "k5"],
        ["f0", "f1", "f0", "f3", "f4", "f1"],
        ["train", "held-out", "train", "train", "train", "train"],
    )


def test_nearest_is_least_squared_error(references):
    noisy = (
        (references.pictures.int() + torch.randint(-60, 60, references.pictures.shape)).clamp(0, 255).to(torch.uint8)
    )
    error = (noisy[:, None].float() - references.pictures[None].float()).square().flatten(2).mean(2)
    assert torch.equal(nearest_picture(references.pictures, noisy), error.argmin(1))
    assert torch.equal(nearest_picture(references.pictures, references.pictures), torch.arange(6))


def test_indices_depend_on_split_and_seed(references):
    assert references.split_indices("held-out") == [1]
    assert references.split_indices("train") == [0, 2, 3, 4, 5]
    assert references.split_indices("train", 3, seed=1) == references.split_indices("train", 3, seed=1)
    assert references.split_indices("nothing") == []


def test_right_and_related_are_counted(references):
    pipe = tiny_pipe()
    drawing = pipe(WORDS[0], candidates=3, seed=0)[0]
    picture = torch.from_numpy(np.array(drawing.image)).permute(2, 0, 1)
    references.pictures[2] = picture  # same family as 0, another key
    drawing = pipe(WORDS[1], candidates=3, seed=0)[0]
    references.pictures[1] = torch.from_numpy(np.array(drawing.image)).permute(2, 0, 1)
    trained = evaluate(pipe, references, "train", n=None, candidates=3, seed=0)
    assert trained.nearest[0] == 2
    assert (bool(trained.right[0]), bool(trained.related[0])) == (False, True)
    held_out = evaluate(pipe, references, "held-out", candidates=3, seed=0)
    exact, family = held_out.rates()
    assert (exact.right, exact.total, family.right) == (1, 1, 1)
    written = json.loads(json.dumps([result.to_dict(references) for result in (trained, held_out)]))
    assert [part["split"] for part in written] == ["train", "held-out"]
    assert written[1]["right"]["rate"] == 1.0
    assert "best of 3" in trained.table()
    again = evaluate(pipe, references, "held-out", candidates=3, repeats=5, seed=0)
    assert again.targets == [1] * 5
    assert again.rates()[0].total == 5
    assert not torch.equal(again.pictures[0], again.pictures[1])  # independent noise
    assert "1 captions of 1 families, drawn 5 times" in again.table()
    assert again.rates()[0].high - again.rates()[0].low > 0.5  # a single cluster
    assert mosaic(references, trained, n=5, columns=3).size == (3 * 56, 2 * 32)
