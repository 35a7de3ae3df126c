"""Zero-shot classification: averages of prompts, ranks, and a model that knows its classes."""

import numpy as np
import pytest
import torch
from torch import nn

from limner.data.sample import Sample
from limner.errors import UserError
from limner.evaluation import zero_shot
from limner.evaluation.zero_shot import Task, evaluate, logits, pictures_of, scenes
from limner.tasks.captions import parse
from tiny import tiny_pipe


class Known(nn.Module):
    """Text [.., T] -> the unit vector of its first token; pictures -> that of their red channel."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))

    def encode_text(self, text):
        return torch.eye(8)[text[:, 0]]

    def encode_image(self, pixels):
        return torch.eye(8)[pixels[:, 0, 0, 0].long()]


def test_a_class_is_the_mean_of_its_prompts():
    prompts = torch.tensor([[[0], [1]], [[1], [1]], [[2], [0]]])  # [C=3, K=2, T=1]
    pictures = torch.arange(3, dtype=torch.uint8)[:, None, None, None].expand(3, 3, 2, 2)
    found = logits(Known(), prompts, pictures)
    half = 0.5**0.5
    torch.testing.assert_close(found, torch.tensor([[half, 0, half], [half, 1, 0], [0, 0, half]]))


def test_scenes_are_of_held_out_combinations_and_prompts_are_captions_of_the_world():
    task = scenes(30, 24, seed=3)
    assert task.pictures.shape == (30, 3, 24, 24) and len(task.names) == 40
    assert torch.equal(task.pictures, scenes(40, 24, seed=3).pictures[:30])
    assert len(set(task.labels)) > 10
    for prompt in task.prompts:
        assert parse(prompt.format("red circle")) is not None, prompt


def test_ranks_and_rates(monkeypatch):
    pipe = tiny_pipe()
    task = Task(
        torch.zeros(4, 3, 24, 24, dtype=torch.uint8), [0, 1, 2, 6], list("abcd"), list("abcdefg"), ("{}", "a {}")
    )
    order = torch.tensor([[9, 8, 7, 6, 5, 4, 3], [9, 8, 7, 6, 5, 4, 3], [1, 1, 1, 1, 1, 1, 1], [9, 8, 7, 6, 5, 4, 3]])
    monkeypatch.setattr(zero_shot, "logits", lambda model, prompts, *_: order[:, : len(prompts)].float())
    result = evaluate(pipe.contrastive, pipe.tokenizer, task)
    assert result.right[1].tolist() == [True, False, False, False]
    assert result.right[5].tolist() == [True, True, True, False]
    assert result.rates()[1].value == pytest.approx(0.25)
    assert "7 classes, 2 prompts each" in result.table() and "by chance 14.29%" in result.table()


def test_every_picture_and_prompt_is_counted_once():
    counted = []
    pipe = tiny_pipe()
    task = Task(torch.zeros(5, 3, 24, 24, dtype=torch.uint8), [0] * 5, list("abcde"), ["red", "blue"], ("a {}", "{}"))
    evaluate(pipe.contrastive, pipe.tokenizer, task, counted.append)
    assert sum(counted) == 2 * 2 + 5


class Few:
    """Three pictures, of which one is held out."""

    def __len__(self):
        return 3

    def __getitem__(self, i):
        from limner.data.prepare import encode_image

        return Sample(encode_image(np.full((8, 8, 3), 40 * i, np.uint8)), (f"thing {i}",), self.meta(i))

    def meta(self, i):
        return {"emoji": str(i), "family": "all", "split": "held-out" if i == 1 else "train"}


def test_the_classes_of_a_data_set_are_all_its_names():
    task = pictures_of(Few(), 8, "held-out", 10)
    assert task.names == ["thing 0", "thing 1", "thing 2"] and task.labels == [1]
    with pytest.raises(UserError, match="no picture in the split"):
        pictures_of(Few(), 8, "neither", 10)
