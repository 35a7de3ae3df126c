"""Training and evaluation of detectors by command."""

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

from limner.cli import main
from limner.evaluation.detection import evaluate, load_detector
from limner.metrics.detection import BoxSet
from limner.models.detector import Detections
from limner.tasks.scene_boxes import SceneBoxes

FAST = ("--training.batch-size", "4", "--training.warmup-steps", "0", "--training.optimizer.lr", "1e-3")


@pytest.fixture(autouse=True)
def few_validation_scenes(monkeypatch):
    monkeypatch.setattr("limner.runs.detector.VALIDATION_SCENES", 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twelve pictures of a white or a red square in COCO's format."""
    folder, rng = tmp_path_factory.mktemp("coco"), np.random.default_rng(0)
    images, annotations = [], []
    for i in range(12):
        pixels, (left, top), side = np.full((50, 60, 3), 80, np.uint8), rng.integers(0, 20, 2).tolist(), 24
        pixels[top : top + side, left : left + side] = (255, 255, 255) if i % 2 else (255, 0, 0)
        Image.fromarray(pixels).save(folder / f"{i}.png")
        images.append({"id": i, "file_name": f"{i}.png", "width": 60, "height": 50})
        annotations.append({"image_id": i, "category_id": i % 2, "bbox": [left, top, side, side]})
    names = [{"id": 0, "name": "red"}, {"id": 1, "name": "white"}]
    data = {"images": images, "annotations": annotations, "categories": names}
    (folder / "annotations.json").write_text(json.dumps(data))
    return folder


def test_a_folder_trains_resumes_and_is_evaluated(folder, tmp_path, capsys):
    run = tmp_path / "run"
    words = ["detector", str(folder), "--out", str(run), "--layout", "ssdlite48", "--augment", "ssdlite", *FAST]
    assert main([*words, "--training.steps", "2"]) == 0
    assert main([*words, "--training.steps", "3"]) == 0
    assert f"evaluate it: limner evaluate detector {run}" in capsys.readouterr().out
    assert load_detector(run).classes == ["red", "white"]
    assert main(["evaluate", "detector", str(run), "--data", str(folder), "-o", str(tmp_path / "scores.json")]) == 0
    assert "12 pictures" in capsys.readouterr().out
    (result,) = json.loads((tmp_path / "scores.json").read_text())["results"]
    assert result["rows"]["ssdlite48"]["time"]["value"] > 0
    assert main(["evaluate", "detector", str(run)]) == 2
    assert "not trained on scenes: name a folder" in capsys.readouterr().err
    assert main(["evaluate", "detector", str(run), "--data", str(folder), "--drawings", "scenes"]) == 2
    assert "train it with `limner detector scenes`" in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["ssdlite48", "ssd48"])
def test_scenes_train_and_the_loss_falls(tmp_path, layout):
    run = tmp_path / "run"
    words = ["detector", "scenes", "--out", str(run), "--layout", layout, *FAST, "--training.batch-size", "16"]
    assert main([*words, "--training.steps", "12", "--training.log-every", "1"]) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < 0.95 * rows[0]["loss"] and math.isfinite(rows[-1]["eval/mAP@50"])
    trained = load_detector(run)
    assert trained.reads_scenes and not trained.model.training


@pytest.mark.slow
def test_a_detector_of_scenes_finds_the_objects(tmp_path):
    run = tmp_path / "run"
    assert main(["detector", "scenes", "--out", str(run), "--training.steps", "240"]) == 0
    result = evaluate(load_detector(run), SceneBoxes(48, "held-out").labeled(200, 1_000), "scenes")
    assert result.rows["ssdlite48"]["mAP@50"].value > 0.97


def test_evaluation_counts_what_the_detector_returns(monkeypatch, tmp_path):
    """A model that returns the true boxes is perfect; one that names other classes finds nothing."""
    main(["detector", "scenes", "--out", str(tmp_path / "run"), *FAST, "--training.steps", "1"])
    trained, pictures = load_detector(tmp_path / "run"), list(SceneBoxes(48).labeled(5, 0))
    truth = [boxes for _, boxes in pictures]

    def perfect(pixels, shift=0):
        rows = [
            (torch.from_numpy(x.boxes), torch.from_numpy(x.labels + shift), torch.ones(len(x.labels))) for x in truth
        ]
        return [Detections(*row, torch.zeros(len(row[1]), 2, dtype=torch.int64)) for row in rows]

    monkeypatch.setattr(trained.model, "detect", perfect)
    assert evaluate(trained, iter(pictures), "").rows["ssdlite48"]["mAP"].value == 1
    monkeypatch.setattr(trained.model, "detect", lambda pixels: perfect(pixels, 5))
    assert evaluate(trained, iter(pictures), "").rows["ssdlite48"]["mAP"].value == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["scenes", "--layout", "ssdlite320"], "scenes cannot have 320 pixels"),
        (["scenes", "--layout", "ssd"], "unknown layout 'ssd': did you mean"),
        (["nothing-here"], "is not a folder"),
        (["scenes", "--training.batch-size", "1"], "batch normalization needs at least 2 pictures"),
    ],
)
def test_wrong_options_raise_one_sentence(tmp_path, capsys, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    assert main(["detector", *words, "--out", "run"]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.strip().splitlines()) == 1


@pytest.mark.parametrize("text", ["{}", '{"classes": [1]}', '{"classes": ["a"], "model": {"layout": "x"}}', "[]"])
def test_a_folder_that_is_not_a_run_raises_one_sentence(tmp_path, capsys, text):
    (tmp_path / "config.json").write_text(text)
    assert main(["evaluate", "detector", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_other_categories_raise_one_sentence(folder, tmp_path, capsys):
    main(["detector", "scenes", "--out", str(tmp_path / "run"), *FAST, "--training.steps", "1"])
    assert main(["evaluate", "detector", str(tmp_path / "run"), "--data", str(folder)]) == 2
    assert "other categories than the detector" in capsys.readouterr().err


def test_box_sets_of_scenes_have_labels_from_one():
    sets = [boxes for _, boxes in SceneBoxes(48).labeled(30, 0)]
    assert all(isinstance(x, BoxSet) and len(x.boxes) == len(x.labels) for x in sets)
    assert set(np.concatenate([x.labels for x in sets]).tolist()) == {1, 2, 3, 4, 5}
