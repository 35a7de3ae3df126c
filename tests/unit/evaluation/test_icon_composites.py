"""Composites of icons train a detector, which reads drawings of icons in GenEval's terms."""

import json
from functools import partial

import numpy as np
import pytest
import torch

from limner.cli import main
from limner.data.open_source import open_source
from limner.errors import UserError
from limner.evaluation.detection import TrainedDetector, load_detector
from limner.evaluation.geneval import Found, evaluate, icon_prompts, read_icons
from limner.evaluation.icon_composites import IconComposites, is_icons
from limner.evaluation.icon_pictures import Icons
from limner.models.detector import DetectorConfig
from tiny import tiny_pipe
from toy_icons import HELD_OUT, SUBJECTS, UNSEEN, write_toy_icons

KNOWN = sorted({*SUBJECTS} - {UNSEEN})


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_toy_icons(tmp_path_factory.mktemp("icons") / "data")


def test_every_icon_is_in_its_box_and_nothing_outside(data):
    composites = IconComposites.open(data, 48)
    assert composites.classes == KNOWN and len(composites.labels) == 4 * len(KNOWN) - 1  # one is held out
    counts = set()
    for seed in range(300):
        picture, boxes, labels = composites.compose(np.random.default_rng(seed))
        ink, outside = np.any(picture < 240, axis=-1), np.ones((48, 48), bool)
        counts.add(len(boxes))
        for left, top, right, bottom in boxes.astype(int).tolist():
            part = ink[top:bottom, left:right]
            assert part[0].any() and part[-1].any() and part[:, 0].any() and part[:, -1].any()
            assert outside[top:bottom, left:right].all()  # no other box is there
            outside[top:bottom, left:right] = False
        assert not ink[outside].any() and set(labels.tolist()) <= {1, 2, 3, 4}
    assert counts == {1, 2, 3, 4}


def test_labels_name_the_subjects_and_held_out_icons_are_apart(data):
    held_out = IconComposites.open(data, 48, "combination")
    assert held_out.classes == KNOWN and held_out.labels.tolist() == [1 + KNOWN.index(HELD_OUT[0])]
    for (picture, boxes), (again, _) in zip(held_out.labeled(20, 5), held_out.labeled(20, 5), strict=True):
        assert np.array_equal(picture, again) and set(boxes.labels.tolist()) == {1 + KNOWN.index(HELD_OUT[0])}


def test_a_split_without_icons_is_refused(tmp_path):
    data = write_toy_icons(tmp_path / "icons", subjects=[UNSEEN])
    for split in ("train", "combination"):
        with pytest.raises(UserError, match=f"lacks icons of the split '{split}' with known subjects"):
            IconComposites.open(data, 48, split)


def test_a_folder_in_cocos_format_may_contain_an_archive(tmp_path):
    (tmp_path / "annotations.json").write_text("{}")
    (tmp_path / "pictures.tar").touch()
    assert not is_icons(tmp_path)
    assert main(["detector", str(tmp_path), "--out", str(tmp_path / "run"), "--layout", "ssdlite48"]) == 2


def test_a_batch_depends_on_its_seeds_alone(data):
    composites, seeds = IconComposites.open(data, 48), np.arange(40)
    batch, part = composites.batch(np.arange(40), seeds), composites.batch(np.array([0]), seeds[7:8])
    count = int((part["labels"] > 0).sum())
    assert torch.equal(batch["pixels"][7], part["pixels"][0]) and batch["pixels"].dtype == torch.uint8
    assert torch.equal(batch["boxes"][7, :count], part["boxes"][0, :count])
    assert torch.equal(batch["labels"][7, :count], part["labels"][0, :count])


def test_drawings_are_right_if_the_detector_finds_their_subject(data):
    icons = Icons.from_source(open_source(str(data)), 24)
    prompts, real = icon_prompts(icons, 8, seed=1, split="train")
    assert real.shape == (8, 24, 24, 3) and real.dtype == np.uint8
    held_out, _ = icon_prompts(icons, 8)
    assert len(prompts) == 8 and [prompt.include[0]["class"] for prompt in held_out] == [HELD_OUT[0]]
    assert all(prompt.prompt.startswith(f"a {prompt.include[0]['class']}, ") for prompt in prompts)

    def read(pictures):  # two of four drawings show a circle, one of them also a bar
        assert pictures.shape == (4, 24, 24, 3) and pictures.dtype == np.uint8
        return [[Found("bar"), Found("circle")], [], [Found("circle")], [Found("cross")]]

    result = evaluate(tiny_pipe(), prompts, read, candidates=5, seed=1)
    circles = np.mean([prompt.include[0]["class"] == "circle" for prompt in prompts])
    crosses = np.mean([prompt.include[0]["class"] == "cross" for prompt in prompts])
    assert list(result.rows) == ["single_object", "overall"]
    assert result.rows["overall"]["right"].value == pytest.approx(circles / 2 + crosses / 4)


def test_detections_below_the_score_do_not_count():
    model = DetectorConfig(layout="ssdlite48", classes=2).build().eval()
    pictures = np.zeros((3, 24, 24, 3), np.uint8)
    for bias, found in ((-20.0, 0), (20.0, 1)):  # of the second class
        with torch.no_grad():
            for head in model.get_submodule("head.classification_head").modules():
                if isinstance(head, torch.nn.Conv2d) and head.bias is not None and head.out_channels % 3 == 0:
                    head.bias.view(-1, 3)[:] = torch.tensor([0.0, -20.0, bias])
        for objects in read_icons(TrainedDetector(model, ["a", "b"]), pictures):
            assert bool(objects) == bool(found) and {item.shape for item in objects} <= {"b"}


def test_the_commands_train_measure_and_check(data, tmp_path, capsys):
    run, words = tmp_path / "run", ["--training.steps", "2", "--training.batch-size", "4"]
    assert is_icons(data) and not is_icons(tmp_path)
    assert main(["detector", str(data), "--out", str(run), *words]) == 0  # the small layout by default
    assert load_detector(run).classes == KNOWN
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["eval/mAP@50"] >= 0
    assert main(["evaluate", "detector", str(run), "--data", str(data), "--count", "9"]) == 0
    assert "composites of held-out icons, 9 pictures" in capsys.readouterr().out
    geneval = partial(_evaluate, "geneval", "icons", "--data", str(data))
    assert geneval("--detector", str(run), "--prompts", "2", "--candidates", "4", "--split", "train") == 0
    printed = capsys.readouterr().out
    assert "single_object" in printed and "% of these 2 icons themselves" in printed
    assert geneval() == 2
    assert "need --data and --detector" in capsys.readouterr().err
    others = write_toy_icons(tmp_path / "others")
    (run / "config.json").write_text((run / "config.json").read_text().replace("cross", "star"))
    assert _evaluate("geneval", "icons", "--data", str(others), "--detector", str(run)) == 2
    assert "the detector does not know 'cross': train it with" in capsys.readouterr().err
    assert _evaluate("detector", str(run), "--data", str(data)) == 2
    assert "other categories than the detector" in capsys.readouterr().err


def _evaluate(*words: str) -> int:
    return main(["evaluate", *words])
