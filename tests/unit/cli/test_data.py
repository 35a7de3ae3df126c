"""`limner data show` and `prepare`: the report counts kept, rejected and unread files."""

import io
import json

import pytest
from PIL import Image

from limner.cli.data import main
from limner.errors import UserError
from limner.runs.run_data import RunData


@pytest.fixture
def folder(tmp_path):
    buffer = io.BytesIO()
    Image.new("RGB", (9, 9), "red").save(buffer, "PNG")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/1.png").write_bytes(buffer.getvalue())
    splits = ["train", "train", "test", "extra", "more", ["a list"], None]
    rows = [{"caption": f"a caption of row {n}", "image": "1.png", "split": split} for n, split in enumerate(splits)]
    rows.append({"caption": "a picture that is missing", "image": "2.png"})
    (tmp_path / "in/t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "in"


UNREAD = '2 samples are never read: their split ("extra", "more") is neither "train" nor "held-out"'


def test_show_and_prepare_count_everything(folder, tmp_path, capsys):
    main(["show", str(folder), "--captions", "3"])
    shown = capsys.readouterr().out
    main(["prepare", str(folder), str(tmp_path / "out")])
    for output in (shown, capsys.readouterr().out):
        lines = output.splitlines()
        assert [line.split()[:-1] for line in lines[1:4]] == [
            ["kept", "6"],
            ["rejected:", "broken", "metadata", "1"],
            ["rejected:", "missing", "image", "1"],
        ]
        assert "extra 1" in lines[4] and lines[5] == UNREAD
    assert json.loads((tmp_path / "out/dataset.json").read_text())["count"] == 8


def test_train_tells_what_it_never_reads(folder, tmp_path):
    with pytest.warns(UserWarning, match="never read") as warned:
        plan = RunData.open(None, folder, tmp_path / "run")
    assert [str(warning.message) for warning in warned] == [f"{folder}: {UNREAD}"]
    assert len(plan.train) == 5 and len(plan.held_out) == 1  # what is broken is met, and counted, in training


def test_names_that_are_not_utf8_are_reported(folder, capsys):
    odd = folder.with_name("odd \udcff")  # the byte 0xff
    folder.rename(odd)
    main(["show", str(odd), "--captions", "0"])
    assert capsys.readouterr().out.splitlines()[0].endswith("odd \\udcff")


@pytest.mark.parametrize("name", ["dvae", "prior"])
def test_show_draws_a_gallery_of_an_augmentation(name, folder, tmp_path, capsys):
    main(["show", str(folder), "--captions", "2", "--augment", name, "-o", str(tmp_path / "gallery.png")])
    gallery = Image.open(tmp_path / "gallery.png").convert("RGB")
    assert gallery.width == 5 * (144 + 12) + 12  # the sample and four versions
    for i in range(5):
        assert gallery.getpixel((12 + i * 156 + 72, 12 + 38 + 72)) == (255, 0, 0)
    assert "written: " in capsys.readouterr().out
    with pytest.raises(UserError, match="flip"):
        main(["show", str(folder), "--augment", "flip"])
    with pytest.raises(UserError, match="-o FILE.png"):
        main(["show", str(folder), "--augment", name])
