"""Zero-shot classification: mean prompt embeddings, ranks, rates."""

import numpy as np
import pytest
import torch
from torch import nn

from limner.data.sample import Sample, Source
from limner.errors import UserError
from limner.evaluation import zero_shot
from limner.evaluation.zero_shot import ZeroShotTask, cosine_similarity, dataset_task, evaluate, scene_task
from limner.tasks.captions import parse
from tiny import tiny_pipe


class Known(nn.Module):
    """Stub of a contrastive model: one-hot of the first token of texts, and of the red channel of pictures."""

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
    similarity = cosine_similarity(Known(), prompts, pictures)
    half = 0.5**0.5
    torch.testing.assert_close(similarity, torch.tensor([[half, 0, half], [half, 1, 0], [0, 0, half]]))


def test_scene_task_has_reproducible_scenes_and_valid_captions():
    task = scene_task(30, 24, seed=3)
    assert task.pictures.shape == (30, 3, 24, 24) and len(task.names) == 40
    assert torch.equal(task.pictures, scene_task(40, 24, seed=3).pictures[:30])
    assert len(set(task.labels)) > 10
    for prompt in task.prompts:
        assert parse(prompt.format("red circle")) is not None, prompt


def test_ranks_and_rates(monkeypatch):
    pipe = tiny_pipe()
    task = ZeroShotTask(
        torch.zeros(4, 3, 24, 24, dtype=torch.uint8), [0, 1, 2, 6], list("abcd"), list("abcdefg"), ("{}", "a {}")
    )
    order = torch.tensor([[9, 8, 7, 6, 5, 4, 3], [9, 8, 7, 6, 5, 4, 3], [1, 1, 1, 1, 1, 1, 1], [9, 8, 7, 6, 5, 4, 3]])
    monkeypatch.setattr(zero_shot, "cosine_similarity", lambda model, prompts, *_: order[:, : len(prompts)].float())
    result = evaluate(pipe.contrastive, pipe.tokenizer, task)
    assert (result.rows["top 1"]["accuracy"].right, result.rows["top 5"]["accuracy"].right) == (1, 3)
    assert result.rows["top 1"]["accuracy"].value == pytest.approx(0.25)
    assert "7 classes, 2 prompts each" in result.table() and "14.29%" in result.table()


def test_progress_counts_every_picture_and_prompt_once():
    counted = []
    pipe = tiny_pipe()
    task = ZeroShotTask(
        torch.zeros(5, 3, 24, 24, dtype=torch.uint8), [0] * 5, list("abcde"), ["red", "blue"], ("a {}", "{}")
    )
    evaluate(pipe.contrastive, pipe.tokenizer, task, counted.append)
    assert sum(counted) == 2 * 2 + 5


class Few(Source):
    """Three pictures, one of them held out."""

    def __len__(self):
        return 3

    def read(self, i, picture):
        from limner.data.image_encode import image_bytes

        return Sample(image_bytes(np.full((8, 8, 3), 40 * i, np.uint8)), (f"thing {i}",), self.read_meta(i))

    def read_meta(self, i):
        return {"emoji": str(i), "family": "all", "split": "held-out" if i == 1 else "train"}


def test_all_names_of_a_data_set_are_classes():
    task = dataset_task(Few(), 8, "held-out", 10)
    assert task.names == ["thing 0", "thing 1", "thing 2"] and task.labels == [1]
    with pytest.raises(UserError, match="is empty"):
        dataset_task(Few(), 8, "neither", 10)
