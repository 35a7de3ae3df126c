"""Pictures with boxes: COCO folders and augmentations."""

import json

import numpy as np
import pytest
from PIL import Image

from limner.data import box_augment
from limner.data.coco import CocoDataset, read_coco
from limner.errors import UserError


def write(folder, annotations, images=((1, "a.png"), (2, "sub/b.png"))):
    """Two gray pictures of 40 x 20 pixels with white boxes where the annotations are."""
    (folder / "sub").mkdir(exist_ok=True)
    for number, name in images:
        pixels = np.full((20, 40, 3), 90, np.uint8)
        for item in annotations:
            if item["image_id"] == number:
                left, top, width, height = (max(0, int(x)) for x in item["bbox"])
                pixels[top : top + height, left : left + width] = 255
        Image.fromarray(pixels).save(folder / name)
    data = {
        "images": [{"id": i, "file_name": name, "width": 40, "height": 20} for i, name in images],
        "categories": [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}],
        "annotations": annotations,
    }
    (folder / "annotations.json").write_text(json.dumps(data))
    return folder


BOXES = [
    {"image_id": 1, "category_id": 7, "bbox": [10, 4, 8, 12]},
    {"image_id": 1, "category_id": 3, "bbox": [30, 0, 10, 10], "iscrowd": 1},
    {"image_id": 2, "category_id": 3, "bbox": [-5, 2, 15, 6]},
]


def test_labels_boxes_and_groups(tmp_path):
    pictures, names = read_coco(write(tmp_path, BOXES))
    assert names == ["cat", "dog"]
    assert pictures[0].boxes.tolist() == [[10, 4, 18, 16], [30, 0, 40, 10]]
    assert pictures[0].labels.tolist() == [2, 1] and pictures[0].groups.tolist() == [False, True]
    assert pictures[1].boxes.tolist() == [[0, 2, 10, 8]] and pictures[1].path == tmp_path / "sub/b.png"


def test_batches_are_resized_and_padded(tmp_path):
    pictures, _ = read_coco(write(tmp_path, [*BOXES, {"image_id": 2, "category_id": 7, "bbox": [20, 0, 10, 20]}]))
    batch = CocoDataset(pictures, 48, "none").batch(np.array([0, 1]), np.array([0, 1], np.uint64))
    assert batch["pixels"].shape == (2, 3, 48, 48)
    assert batch["labels"].tolist() == [[2, 0], [1, 2]]
    np.testing.assert_allclose(batch["boxes"][0, 0], [12, 9.6, 21.6, 38.4])
    left, top, right, bottom = batch["boxes"][1, 1].int().tolist()
    assert batch["pixels"][1, :, top:bottom, left:right].min() == 255  # the box follows the pixels


def test_a_bad_picture_is_replaced(tmp_path):
    pictures, _ = read_coco(write(tmp_path, BOXES))
    (tmp_path / "a.png").write_bytes(b"no picture")
    batch = CocoDataset(pictures, 48, "ssd").batch(np.array([0]), np.array([3], np.uint64))
    assert batch["labels"].tolist() == [[1]]
    (tmp_path / "sub/b.png").unlink()
    with pytest.raises(UserError, match=r"none of the 2 pictures can be used .*check the data"):
        CocoDataset(pictures, 48, "ssd").batch(np.array([0]), np.array([3], np.uint64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": [{"id": 1, "file_name": "../a.png", "width": 4, "height": 4}]}, "leaves the folder"),
        ({"images": [{"id": 1, "file_name": "/etc/passwd", "width": 4, "height": 4}]}, "leaves the folder"),
        ({"images": [{"id": 1, "file_name": "a.png", "width": 10**9, "height": 4}]}, "1000000000 x 4"),
        ({"images": [{"id": [1], "file_name": "a.png", "width": 4, "height": 4}]}, "not in COCO's format"),
        ({"images": [], "annotations": []}, "lists no pictures"),
        ({"categories": []}, "0 categories"),
        ({"annotations": [{"image_id": 9, "category_id": 7, "bbox": [0, 0, 1, 1]}]}, "not in COCO's format"),
        ({"annotations": [{"image_id": 1, "category_id": 7, "bbox": [0, 0, 1]}]}, "not in COCO's format"),
        ({"annotations": 3}, "not in COCO's format"),
    ],
)
def test_malformed_annotations_raise_one_sentence(tmp_path, change, message):
    write(tmp_path, BOXES)
    path = tmp_path / "annotations.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"annotations": []} | change))
    with pytest.raises(UserError, match=message):
        read_coco(tmp_path)


def test_a_folder_needs_annotations(tmp_path):
    with pytest.raises(UserError, match="0 JSON files"):
        read_coco(tmp_path)
    write(tmp_path, BOXES)
    (tmp_path / "annotations.json").rename(tmp_path / "instances.json")
    assert len(read_coco(tmp_path)[0]) == 2


def marked(rng, count=3):
    """A picture whose boxes are filled with a different value each, and the boxes."""
    image, boxes = np.zeros((60, 80, 3), np.uint8), []
    for i in range(count):
        left, top = 4 + 25 * i, int(rng.integers(2, 30))
        image[top : top + 20, left : left + 16] = 100 + 50 * i
        boxes.append([left, top, left + 16, top + 20])
    return image, np.array(boxes, np.float32)


@pytest.mark.parametrize("name", ["ssd", "ssdlite"])
def test_boxes_follow_their_pixels(name, monkeypatch):
    monkeypatch.setattr(box_augment, "distort_colors", lambda image, rng: image)
    counts = set()
    for seed in range(60):
        rng = np.random.default_rng(seed)
        image, boxes = marked(rng)
        result, moved, kept = box_augment.augment(name, image, boxes, rng)
        height, width = result.shape[:2]
        counts.add(len(kept))
        assert len(kept) and moved.min() >= 0 and (moved[:, 2:] <= [width, height]).all()
        for (left, top, right, bottom), i in zip(moved.astype(int).tolist(), kept, strict=True):
            assert (result[top:bottom, left:right] == 100 + 50 * i).all()
    assert counts == {1, 2, 3}


def test_zoom_out_keeps_the_picture_whole():
    sizes = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        image, boxes = marked(rng)
        canvas, moved = box_augment.zoom_out(image, boxes, rng)
        sizes.append(canvas.shape[0] / 60)
        left, top = (moved - boxes)[0, :2].astype(int)
        np.testing.assert_array_equal(canvas[top : top + 60, left : left + 80], image)
    assert min(sizes) == 1 and 2 < max(sizes) <= 4


def test_distortion_changes_colors_within_bounds():
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (16, 16, 3), np.uint8)
    results = [box_augment.distort_colors(image, np.random.default_rng(seed)) for seed in range(30)]
    assert all(x.shape == image.shape and x.dtype == np.uint8 for x in results)
    assert len({x.tobytes() for x in results}) > 20
    assert box_augment.distort_colors(image, np.random.default_rng(3)).tobytes() == results[3].tobytes()


def test_a_picture_without_boxes_stays():
    image, boxes = np.zeros((10, 10, 3), np.uint8), np.zeros((0, 4), np.float32)
    result, moved, kept = box_augment.zoom_in(image, boxes, np.random.default_rng(0))
    assert result is image and moved.shape == (0, 4) and len(kept) == 0


def test_a_missing_folder_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="is not a folder: name one with"):
        read_coco(tmp_path / "missing")
