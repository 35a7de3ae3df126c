"""Detectors: structure, default boxes, detections."""

import pytest
import torch

from limner.models.detector import LAYOUTS, DefaultBoxes, DetectorConfig


def test_default_boxes_of_a_two_by_one_grid():
    """Sides s, sqrt(s s'), and for the ratio 4 a wide and a tall box; centers in the middle of the cells."""
    boxes = DefaultBoxes((0.2, 0.8), ((4,),)).boxes([(1, 2)], 100)
    centers, sizes = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
    torch.testing.assert_close(centers, torch.tensor([[25.0, 50]] * 4 + [[75.0, 50]] * 4))
    torch.testing.assert_close(sizes, torch.tensor([[20.0, 20], [40, 40], [40, 10], [10, 40]] * 2))


def test_ssd300_has_the_papers_8732_boxes():
    with torch.device("meta"):
        model = DetectorConfig(layout="ssd300").build()
        maps = model.backbone(torch.empty(1, 3, 300, 300))
    assert [tuple(x.shape[-2:]) for x in maps] == [(n, n) for n in (38, 19, 10, 5, 3, 1)]
    counts = LAYOUTS["ssd300"].default_boxes.counts
    assert sum(x.shape[-1] ** 2 * count for x, count in zip(maps, counts, strict=True)) == 8732


@pytest.mark.parametrize(("width", "depths"), [(1, [512, 256, 256, 128]), (0.05, [25, 16, 16, 16])])
def test_ssdlites_first_map_is_the_expansion_of_stride_16(width, depths):
    with torch.device("meta"):
        model = DetectorConfig(layout="ssdlite320", width=width).build().eval()
        maps = model.backbone(torch.empty(1, 3, 320, 320))
    assert [x.shape[-1] for x in maps] == [20, 10, 5, 3, 2, 1]
    expanded = 672 if width == 1 else 32
    assert maps[0].shape[1] == expanded and [x.shape[1] for x in maps[2:]] == depths
    assert model.backbone.channels == [x.shape[1] for x in maps]


def test_first_features_have_unit_length_times_the_scale():
    model = DetectorConfig(layout="ssd48", classes=2).build()
    maps = model.backbone(torch.rand(2, 3, 48, 48) * 255)
    torch.testing.assert_close(maps[0].norm(dim=1), torch.full((2, 12, 12), 20.0))


@pytest.mark.parametrize("layout", ["ssd48", "ssdlite48"])
def test_detections_are_sorted_distinct_and_within_the_picture(layout):
    torch.manual_seed(0)
    model = DetectorConfig(layout=layout, classes=3, attributes=(2, 4)).build().eval()
    with torch.no_grad():
        for head in model.head.values():
            for block in head.module_list:
                list(block.parameters())[-2].normal_(std=0.3)
    pixels = torch.randint(0, 256, (3, 3, 48, 48), dtype=torch.uint8)
    found = model.detect(pixels)
    assert len(found) == 3
    for one in found:
        n = len(one.scores)
        assert 0 < n <= model.layout.detections and one.scores.diff().le(0).all()
        assert one.boxes.min() >= 0 and one.boxes.max() <= 48
        assert set(one.labels.tolist()) <= {1, 2, 3} and one.attributes.shape == (n, 2)
        assert one.attributes[:, 0].max() < 2 and one.attributes[:, 1].max() < 4
    # A picture's detections do not depend on its batch.
    for alone, together in zip([model.detect(x[None])[0] for x in pixels], found, strict=True):
        assert torch.equal(alone.labels, together.labels)
        torch.testing.assert_close(alone.boxes, together.boxes, rtol=1e-4, atol=1e-3)


def test_a_detector_may_find_nothing():
    model = DetectorConfig(layout="ssdlite48", classes=3).build().eval()
    with torch.no_grad():
        for block in model.head["classification_head"].module_list:
            block[-1].bias.view(-1, 4)[:, 0] = 50  # background everywhere
    (found,) = model.detect(torch.zeros(1, 3, 48, 48, dtype=torch.uint8))
    assert found.boxes.shape == (0, 4) and len(found.labels) == len(found.scores) == len(found.attributes) == 0
