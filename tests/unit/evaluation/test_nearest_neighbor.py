"""The nearest real picture has the least squared error; variants share a family."""

import numpy as np
import pytest
import torch

from limner.evaluation.generate_batches import to_image
from limner.evaluation.nearest_neighbor import ReferenceSet, ReferenceSettings, evaluate, nearest_picture
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
    (trained,) = evaluate(pipe, references, "train", ReferenceSettings(candidates=3, seed=0))
    assert trained.cases[0]["nearest"] == "a"
    assert trained.cases[0]["best of 3"] == {"right picture": 0, "or a variant": 1}
    (held_out,) = evaluate(pipe, references, "held-out", ReferenceSettings(candidates=3, seed=0))
    row = held_out.rows["best of 3"]
    assert (row["right picture"].right, row["right picture"].total, row["or a variant"].right) == (1, 1, 1)
    assert held_out.rows["chance"]["right picture"].value == 1 / 6
    assert trained.title.startswith("train, ") and "best of 3" in trained.table()
    (again,) = evaluate(pipe, references, "held-out", ReferenceSettings(candidates=3, repeats=5, seed=0))
    row = again.rows["best of 3"]["right picture"]
    assert row.total == 5 and row.high - row.low > 0.5  # a single cluster
    drawn = [sheet_row.pictures[0][0].tobytes() for sheet_row in again.sheet]
    assert len(drawn) == 5 and drawn[0] != drawn[1]  # independent noise
    assert again.sheet[0].pictures[1][0].tobytes() == to_image(references.pictures[1]).tobytes()
    assert "1 captions of 1 subjects, drawn 5 times" in again.table()
