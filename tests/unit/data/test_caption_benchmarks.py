"""COCO and CUB in the layouts of their authors, with synthetic pictures."""

import json

import pytest
from PIL import Image

from limner.data.open_source import open_source
from limner.data.sample import Rejected, group_by_split
from limner.errors import UserError


def write_picture(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (16, 12), (9, 99, 199)).save(path, "JPEG")


def write_coco(folder, images=None, annotations=None):
    images = images or [{"id": i, "file_name": f"COCO_val2014_{i:012}.jpg", "license": 1} for i in (3, 7)]
    annotations = annotations or [
        {"image_id": i, "id": 10 * i + k, "caption": f"caption {k} of {i}"} for k in range(5) for i in (3, 7)
    ]
    (folder / "annotations").mkdir(parents=True)
    content = {"info": {}, "licenses": [], "images": images, "annotations": annotations}
    (folder / "annotations/captions_val2014.json").write_text(json.dumps(content))
    (folder / "annotations/instances_val2014.json").write_text("{}")
    for i in (3, 7):
        write_picture(folder / f"val2014/COCO_val2014_{i:012}.jpg")


def write_cub(folder, classes=("001.Black_footed_Albatross", "002.Laysan_Albatross")):
    names = [f"{kind}/bird_{i}" for kind in classes for i in range(2)]
    folder.mkdir()
    (folder / "images.txt").write_text("".join(f"{n} {name}.jpg\n" for n, name in enumerate(names, 1)))
    (folder / "train_test_split.txt").write_text("1 1\n2 0\n3 1\n4 0\n")
    for name in names:
        write_picture(folder / f"images/{name}.jpg")
        (folder / f"text_c10/{name}.txt").parent.mkdir(parents=True, exist_ok=True)
        (folder / f"text_c10/{name}.txt").write_text("".join(f"this bird {k} of {name}\n" for k in range(10)))


def test_coco_has_five_captions_for_each_picture_of_the_validation_set(tmp_path):
    write_coco(tmp_path / "coco")
    source = open_source(tmp_path / "coco")
    assert len(source) == 2 and {source.meta(i)["split"] for i in range(2)} == {"held-out"}
    sample = source[1]
    assert sample.captions == tuple(f"caption {k} of 7" for k in range(5)) and sample.meta["coco_id"] == 7
    assert sample.image[:2] == b"\xff\xd8"
    assert source.captions(0)[0] == "caption 0 of 3"


def test_coco_splits_without_pictures_are_left_out(tmp_path):
    write_coco(tmp_path / "coco")
    (tmp_path / "coco/annotations/captions_train2014.json").write_text("not read")
    assert len(open_source(tmp_path / "coco")) == 2


def test_cub_has_ten_captions_for_each_picture_and_the_split_of_its_authors(tmp_path):
    write_cub(tmp_path / "CUB_200_2011")
    source = open_source(tmp_path / "CUB_200_2011")
    splits = group_by_split(source)
    assert {name: len(part) for name, part in splits.items()} == {"train": 2, "held-out": 2}
    sample = splits["held-out"][0]
    assert len(sample.captions) == 10 and sample.captions[0] == "this bird 0 of 001.Black_footed_Albatross/bird_1"
    assert sample.meta["class"] == "001.Black_footed_Albatross"


def test_cub_holds_out_the_classes_of_testclasses(tmp_path):
    write_cub(tmp_path / "cub")
    (tmp_path / "cub/testclasses.txt").write_text("002.Laysan_Albatross\n")
    held_out = group_by_split(open_source(tmp_path / "cub"))["held-out"]
    assert {held_out.meta(i)["class"] for i in range(2)} == {"002.Laysan_Albatross"}


def test_defects_of_single_samples_are_rejected(tmp_path):
    write_coco(tmp_path / "coco", annotations=[{"image_id": 3, "caption": "one"}])
    (tmp_path / "coco/val2014/COCO_val2014_000000000003.jpg").unlink()
    source = open_source(tmp_path / "coco")
    for index, reason in ((0, "missing image"), (1, "missing caption")):
        with pytest.raises(Rejected, match=reason):
            source[index]
    write_cub(tmp_path / "cub")
    (tmp_path / "cub/text_c10/001.Black_footed_Albatross/bird_0.txt").unlink()
    with pytest.raises(Rejected, match="missing caption"):
        open_source(tmp_path / "cub")[0]


def test_damaged_and_hostile_indexes_raise_a_sentence(tmp_path):
    outside = [{"id": 3, "file_name": "../../secret.jpg"}]
    write_coco(tmp_path / "a", images=outside)
    write_coco(tmp_path / "b", annotations=["caption"])
    write_coco(tmp_path / "c")
    (tmp_path / "c/annotations/captions_val2014.json").write_text("[1, 2")
    write_cub(tmp_path / "d")
    (tmp_path / "d/images.txt").write_text("1 ../../secret.jpg\n")
    write_cub(tmp_path / "e")
    (tmp_path / "e/images.txt").write_bytes(b"1 \xff/x.jpg\n")
    write_cub(tmp_path / "f")
    (tmp_path / "f/text_c10").rename(tmp_path / "f/captions")
    for name, says in (
        ("a", "outside its folder"), ("b", "does not have the format of COCO's captions"), ("c", "is not valid JSON"),
        ("d", "not CLASS/PICTURE"), ("e", "is not UTF-8"), ("f", "without captions: put those of Reed et al."),
    ):  # fmt: skip
        with pytest.raises(UserError, match=says):
            open_source(tmp_path / name)
