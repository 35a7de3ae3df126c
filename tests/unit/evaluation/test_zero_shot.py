"""Zero-shot classification: mean prompt embeddings, ranks, files of classes and prompts, folders of classes."""

from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

from limner.data.class_folders import ClassFolders
from limner.data.image_encode import image_bytes
from limner.data.sample import Sample, Source
from limner.errors import UserError
from limner.evaluation.zero_shot import (
    IMAGENET_PROMPTS,
    LabeledPictures,
    ZeroShotTask,
    class_embeddings,
    dataset_task,
    evaluate,
    read_classes,
    read_prompts,
    scene_task,
)
from limner.models.contrastive import CLIPConfig
from limner.reranker import Reranker
from limner.tasks.captions import parse
from tiny import tiny_pipe


class Known(nn.Module):
    """Stub of a contrastive model: one-hot of the first token of texts, and of the red channel of pictures."""

    config = CLIPConfig(text_len=1)

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))

    def encode_text(self, text):
        return torch.eye(8)[text[:, 0]]

    def encode_image(self, pixels):
        return torch.eye(8)[pixels[:, 0, 0, 0].long()]


class Digits:
    """Stub of a tokenizer: the last digit of a text."""

    def encode(self, captions, length):
        return torch.tensor([[int([c for c in caption if c.isdigit()][-1])] for caption in captions])


KNOWN = Reranker(Known(), Digits(), "known")


def reranker():
    pipe = tiny_pipe()
    return Reranker(pipe.contrastive, pipe.tokenizer, pipe.name)


def task(reds, labels, names, prompts=("{}",)):
    pictures = torch.tensor(reds, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 2, 2)
    batch = LabeledPictures(pictures, labels, [str(i) for i in range(len(reds))])
    return ZeroShotTask(batches=[batch], count=len(reds), names=names, prompts=prompts, preprocessing="none")


def test_a_class_is_the_mean_of_its_prompts():
    prompts = torch.tensor([[[0], [1]], [[1], [1]], [[2], [0]]])  # [C=3, K=2, T=1]
    embeddings = class_embeddings(Known(), prompts, lambda _: None)
    similarity = torch.eye(8)[:3] @ embeddings.mT
    half = 0.5**0.5
    torch.testing.assert_close(similarity, torch.tensor([[half, 0, half], [half, 1, 0], [0, 0, half]]))


def test_scene_task_has_reproducible_scenes_and_valid_captions():
    scenes = scene_task(300, 24, seed=3)
    first, second = scenes.batches
    assert (len(first.labels), len(second.labels)) == (256, 44) and len(scenes.names) == 40
    (again,) = scene_task(40, 24, seed=3).batches
    assert torch.equal(again.pictures, first.pictures[:40]) and again.labels == first.labels[:40]
    assert len(set(first.labels)) > 10
    for prompt in scenes.prompts:
        assert parse(prompt.replace("{}", "red circle")) is not None, prompt


def test_ranks_and_rates():
    """Classes 1 to 7; a picture resembles one, and the others follow in their order."""
    names = [f"class {i}" for i in range(1, 8)]
    result = evaluate(KNOWN, task([1, 1, 1, 1], [0, 1, 4, 6], names, ("{}", "a {}")))
    assert (result.rows["top 1"]["accuracy"].right, result.rows["top 5"]["accuracy"].right) == (1, 3)
    assert result.rows["top 1"]["accuracy"].value == pytest.approx(0.25)
    assert "7 classes, 2 prompts each" in result.table() and "14.29%" in result.table()


def test_a_name_with_braces_is_text():
    result = evaluate(KNOWN, task([2], [1], ["{0.__class__} 1", "{} 2"], ("a {}",)))
    assert result.rows["top 1"]["accuracy"].right == 1


def test_progress_counts_every_picture_and_prompt_once():
    counted, model = [], reranker()
    pictures = torch.zeros(5, 3, 24, 24, dtype=torch.uint8)
    batches = [LabeledPictures(pictures, [0] * 5, list("abcde"))]
    red = ZeroShotTask(batches=batches, count=5, names=["red", "blue"], prompts=("a {}", "{}"), preprocessing="none")
    evaluate(model, red, counted.append)
    assert sum(counted) == 2 * 2 + 5


class Few(Source):
    """Three pictures, one of them held out."""

    def __len__(self):
        return 3

    def read(self, i, picture):
        return Sample(image_bytes(np.full((8, 8, 3), 40 * i, np.uint8)), (f"thing {i}",), self.read_meta(i))

    def read_meta(self, i):
        return {"emoji": str(i), "family": "all", "split": "held-out" if i == 1 else "train"}


def test_all_names_of_a_data_set_are_classes():
    few = dataset_task(Few(), 8, "held-out", 10)
    (batch,) = few.batches
    assert few.names == ["thing 0", "thing 1", "thing 2"] and batch.labels == [1] and batch.clusters == ["all"]
    with pytest.raises(UserError, match="is empty"):
        dataset_task(Few(), 8, "neither", 10)


def test_a_file_gives_the_classes_other_names_and_more():
    classes = {"other": "0", "thing 0": "1", "thing 1": "2", "thing 2": "3"}
    few = dataset_task(Few(), 8, "train", 10, classes=classes)
    (batch,) = few.batches
    assert few.names == ["0", "1", "2", "3"] and batch.labels == [1, 3]
    with pytest.raises(UserError, match=r"file of classes lacks 'thing 2', a class of the data: add a line"):
        dataset_task(Few(), 8, "train", 10, classes={"thing 0": "1", "thing 1": "2"})


def test_files_of_prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("# mine\n\na photo of a {}.\n{}\n")
    assert read_prompts(path) == ["a photo of a {}.", "{}"]
    for text, says in (("a photo\n", "'a photo' must have one {}"), ("{} {}", "must have one"), ("# no\n", "is empty")):
        path.write_text(text)
        with pytest.raises(UserError, match=says):
            read_prompts(path)
    for name, says in (("missing", "cannot be read"), (".", "is a folder")):
        with pytest.raises(UserError, match=says):
            read_prompts(tmp_path / name)


def test_the_prompts_of_clip_for_imagenet():
    prompts = read_prompts(IMAGENET_PROMPTS)
    assert len(set(prompts)) == len(prompts) == 80 and "itap of a {}." in prompts
    assert "MIT License" in IMAGENET_PROMPTS.read_text() and "Copyright (c) 2021 OpenAI" in IMAGENET_PROMPTS.read_text()


def test_files_of_classes(tmp_path):
    path = tmp_path / "classes.txt"
    path.write_text("n01440764 tench, Tinca tinca\nn02\tgold fish\ngolden_retriever\nhot dog\n")
    assert read_classes(path) == {
        "n01440764": "tench, Tinca tinca", "n02": "gold fish", "golden_retriever": "golden retriever",
        "hot dog": "hot dog",
    }  # fmt: skip
    for text, says in (
        ("a\na\n", "has the class 'a' twice"), ("\n", "is empty"),
        (b"\xff\xfe\x00", "as UTF-8"),
    ):  # fmt: skip
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(UserError, match=says):
            read_classes(path)
    path.write_text("n02012849 crane\nn03126707 crane\n")
    with pytest.warns(UserWarning, match="one name cannot be distinguished: 2 times 'crane'"):
        assert len(read_classes(path)) == 2


def picture(path, red):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(image_bytes(np.full((9, 12, 3), red, np.uint8)))


def test_class_folders(tmp_path):
    for name, red in (("n00000001/a.png", 1), ("n00000001/b.PNG", 1), ("n00000002/a.png", 2), (".hidden/a.png", 3)):
        picture(tmp_path / name, red)
    (tmp_path / "n00000002/broken.jpg").write_text("no picture")
    (tmp_path / "n00000002/notes.txt").write_text("a note")
    source = ClassFolders(tmp_path)
    assert [source.captions(i)[0] for i in range(len(source))] == ["n00000001"] * 2 + ["n00000002"] * 2
    classes = {"n00000001": "number 1", "n00000002": "number 2", "n00000003": "number 3"}
    folders = dataset_task(source, 4, "held-out", 10, classes=classes, augment="bicubic")
    result = evaluate(KNOWN, folders)
    assert result.rows["top 1"]["accuracy"].total == result.rows["top 1"]["accuracy"].right == 3
    assert result.title == "3 pictures, 3 classes, 2 prompts each, skipped broken image: 1"
    assert folders.rejected == Counter({"broken image": 1}) and result.settings["skipped"] == {"broken image": 1}
    assert result.settings["preprocessing"].startswith(
        "shorter side resized to 4 pixels by Pillow's bicubic filter, center"
    )
    with pytest.raises(UserError, match="'n00000001' is a WordNet id: name it by --classes"):
        dataset_task(source, 4, "held-out", 10)
    two = dataset_task(source, 4, "held-out", 2, seed=1, classes=classes)
    assert two.count == 2


def test_folders_without_classes_or_pictures(tmp_path):
    picture(tmp_path / "data/a.png", 1)
    with pytest.raises(UserError, match="lacks class folders"):
        ClassFolders(tmp_path / "data")
    (tmp_path / "data/cat").mkdir()
    with pytest.raises(UserError, match="the class folder .*cat lacks pictures"):
        ClassFolders(tmp_path / "data")
    (tmp_path / "data/cat/a.png").write_text("no picture")
    with pytest.raises(UserError, match=r"none of the 1 pictures can be read \(broken image: 1\)"):
        evaluate(reranker(), dataset_task(ClassFolders(tmp_path / "data"), 24, "held-out", 10))
