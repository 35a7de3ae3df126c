"""Detectors against torchvision's, on the same weights (`torchvision_detectors.py`)."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from limner.models.boxes import box_iou, suppress
from limner.models.detector import DetectorConfig
from limner.objectives.detection import MultiBoxLoss, match

_SPEC = importlib.util.spec_from_file_location("stored", Path(__file__).parent / "torchvision_detectors.py")
assert _SPEC and _SPEC.loader
stored = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(stored)
REFERENCE = json.loads(stored.STORED.read_text())


@pytest.fixture(scope="module", params=list(stored.SIZES))
def name(request):
    return request.param


@pytest.fixture(scope="module")
def model(name):
    model = DetectorConfig(layout=name, classes=stored.CLASSES).build().eval()
    stored.fill(model)
    return model


@pytest.fixture(scope="module")
@torch.no_grad()
def predictions(name, model):
    return model(stored.picture(stored.SIZES[name]))


def close(values, expected, tolerance):
    result = stored.summary(values)
    assert result["shape"] == expected["shape"]
    torch.testing.assert_close(result["mean"], expected["mean"], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(result["std"], expected["std"], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        torch.tensor(result["values"]), torch.tensor(expected["values"]), rtol=tolerance, atol=tolerance
    )


def test_published_state_dicts_fit(name):
    with torch.device("meta"):
        model = DetectorConfig(layout=name, classes=90).build()
    assert sum(x.numel() for x in model.parameters()) == REFERENCE[name]["parameters"]
    assert stored.names_digest(model) == REFERENCE[name]["names"]


def test_default_boxes_and_heads(name, predictions):
    close(predictions.default_boxes, REFERENCE[name]["default_boxes"], 1e-4)
    close(predictions.offsets[:1], REFERENCE[name]["offsets"], 2e-3)
    close(predictions.logits[:1], REFERENCE[name]["logits"], 2e-3)


def test_matches_and_loss(name, predictions):
    batch = {"boxes": stored.BOXES[None], "labels": stored.LABELS[None]}
    matches = match(predictions.default_boxes, batch["boxes"], batch["labels"] > 0, 0.5)
    assert int((matches >= 0).sum()) == REFERENCE[name]["matched"]
    losses = MultiBoxLoss().losses(predictions, batch)
    assert float(losses["boxes"]) == pytest.approx(REFERENCE[name]["loss"]["bbox_regression"], rel=1e-4)
    assert float(losses["classes"]) == pytest.approx(REFERENCE[name]["loss"]["classification"], rel=1e-4)


def test_detections(name, model):
    (found,) = model.detect(stored.picture(stored.SIZES[name]))
    expected = REFERENCE[name]
    assert len(found.labels) == expected["detections"]
    assert found.labels[:8, None].tolist() == expected["labels"]
    torch.testing.assert_close(found.scores[:8, None], torch.tensor(expected["scores"]), rtol=0, atol=1e-3)
    torch.testing.assert_close(found.boxes[:8], torch.tensor(expected["boxes"]), rtol=0, atol=0.05)


def test_overlaps_and_suppression_equal_the_slow_form():
    rng = np.random.default_rng(0)
    low = rng.uniform(0, 60, (3, 40, 2))
    boxes = torch.from_numpy(np.concatenate([low, low + rng.uniform(5, 40, low.shape)], -1)).float()
    expected = [[[stored.iou_of(a, b) for b in one] for a in one] for one in boxes.tolist()]
    torch.testing.assert_close(box_iou(boxes, boxes), torch.tensor(expected))
    for one, kept in zip(boxes, suppress(boxes, 0.4), strict=True):
        scores = torch.arange(len(one), 0, -1).float()
        assert kept.nonzero()[:, 0].tolist() == stored.suppress_one_by_one(one, scores, 0.4).tolist()
