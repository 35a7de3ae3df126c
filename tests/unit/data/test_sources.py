"""Sources: the same samples from every layout, and a stable reason for every defect."""

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image

from limner.data.prepare import prepare
from limner.data.sources import Rejected, decode_image, open_source
from limner.errors import UserError

CAPTIONS = ["a red square", "two cats, asleep", 'she said "hi"']


def encode(array, format="PNG", **options):
    buffer = io.BytesIO()
    image = array if isinstance(array, Image.Image) else Image.fromarray(array)
    image.save(buffer, format, **options)
    return buffer.getvalue()


def picture(seed, height=20, width=24):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path):
    for n, caption in enumerate(CAPTIONS):
        path = tmp_path / "data" / f"part{n % 2}" / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(picture(n)))
        path.with_suffix(".txt").write_text(caption)
    return tmp_path / "data"


def reason(source, index):
    with pytest.raises(Rejected) as caught:
        source[index]
    return caught.value.reason


def table(folder, kind, rows):
    path = folder / f"table.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    elif kind == "csv":
        import csv

        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    return path


def check(source):
    found = {source[i].captions: decode_image(source[i].image) for i in range(len(source))}
    assert set(found) == {(caption,) for caption in CAPTIONS}
    for n, caption in enumerate(CAPTIONS):
        assert np.array_equal(found[(caption,)], picture(n))


def test_folder(folder):
    check(open_source(folder))


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("column", ["caption", "TEXT"])
def test_tables_with_paths(folder, kind, column):
    rows = [{"id": n, column: c, "file_name": f"part{n % 2}/{n}.png"} for n, c in enumerate(CAPTIONS)]
    check(open_source(table(folder, kind, rows)))


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_tables_with_bytes(tmp_path, kind):
    def cell(n):
        data = encode(picture(n))
        return data if kind == "parquet" else base64.b64encode(data).decode()

    rows = [{"image": cell(n), "prompt": caption} for n, caption in enumerate(CAPTIONS)]
    check(open_source(table(tmp_path, kind, rows)))


def test_hugging_face_layouts(folder):
    rows = [
        {"image": {"bytes": encode(picture(n)), "path": None}, "text": [caption, "another"]}
        for n, caption in enumerate(CAPTIONS)
    ]
    source = open_source(table(folder, "parquet", rows))
    assert source[1].captions == (CAPTIONS[1], "another")
    for path in folder.rglob("*.txt"):
        path.unlink()
    rows = [{"file_name": f"part{n % 2}/{n}.png", "text": c} for n, c in enumerate(CAPTIONS)]
    (folder / "table.parquet").unlink()
    table(folder, "jsonl", rows).rename(folder / "metadata.jsonl")
    check(open_source(folder))  # an "imagefolder"


def test_shards_by_folder_and_glob(folder, tmp_path):
    prepare(folder, tmp_path / "shards")
    check(open_source(tmp_path / "shards"))
    check(open_source(str(tmp_path / "shards" / "*.tar")))
    (tmp_path / "other").mkdir()
    (tmp_path / "shards/00000.tar").rename(tmp_path / "other/00000.tar")
    check(open_source(f"{tmp_path}/**/0*.tar"))


def test_columns(folder):
    rows = [{"words": c, "where": f"part{n % 2}/{n}.png"} for n, c in enumerate(CAPTIONS)]
    path = table(folder, "jsonl", rows)
    check(open_source(path, caption="words", image="where"))
    with pytest.raises(UserError, match="words, where"):
        open_source(path)
    with pytest.raises(UserError, match='no column "word"'):
        open_source(path, caption="word", image="where")


def test_defects_in_a_folder(tmp_path):
    good = encode(picture(0))
    files = {
        "a.png": good,
        "b.png": good,
        "b.txt": b"\xff\xfe not utf-8",
        "c.png": good,
        "c.txt": b" \n\n",
        "d.txt": b"no picture",
        "e.png": good,
        "e.txt": "\ufefffine: naïve café\nsecond  phrasing\n".encode(),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    source = open_source(tmp_path)
    assert [reason(source, i) for i in range(4)] == [
        "missing caption",
        "caption is not UTF-8",
        "empty caption",
        "missing image",
    ]
    assert source[4].captions == ("fine: naïve café", "second phrasing")


def test_defects_in_tables(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "secret.png").write_bytes(encode(picture(0)))
    (tmp_path / "data/in.png").write_bytes(encode(picture(1)))
    (tmp_path / "data/link.png").symlink_to(tmp_path / "secret.png")
    lines = [
        b'{"caption": "in", "image": "in.png"}',
        b'{"caption": "out", "image": "../secret.png"}',
        json.dumps({"caption": "out", "image": str(tmp_path / "secret.png")}).encode(),
        b'{"caption": "out", "image": "link.png"}',
        b'{"caption": "gone", "image": "gone.png"}',
        b'{"caption": null, "image": "in.png"}',
        b'{"caption": "x", "image": null}',
        b'{"caption": "\xff\xfe", "image": "in.png"}',
        b'{"caption": "half',
        b"[1, 2]",
        b"",
        b'{"caption": "folder", "image": "."}',
    ]
    path = tmp_path / "data/table.jsonl"
    path.write_bytes(b"\n".join(lines))
    source = open_source(path)
    assert source[0].captions == ("in",)
    assert [reason(source, i) for i in range(1, len(source))] == [
        *["path outside the data folder"] * 3,
        "missing image",
        "missing caption",
        "missing image",
        "caption is not UTF-8",
        "broken row",
        "broken row",
        "missing image",
    ]
    allowed = open_source(path, allow_outside=True)
    assert np.array_equal(decode_image(allowed[1].image), picture(0))


def test_csv_that_is_not_utf8(tmp_path):
    (tmp_path / "1.png").write_bytes(encode(picture(0)))
    (tmp_path / "t.csv").write_bytes(b'caption,image\ncaf\xe9,1.png\n"two\nlines",1.png\n')
    source = open_source(tmp_path / "t.csv")
    assert reason(source, 0) == "caption is not UTF-8"
    assert source[1].captions == ("two", "lines")


def test_mistakes_are_one_sentence(tmp_path, monkeypatch):
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "*.tar"):
        with pytest.raises(UserError) as caught:
            open_source(path)
        assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
    (tmp_path / "x.docx").write_bytes(b"")
    with pytest.raises(UserError, match="docx"):
        open_source(tmp_path / "x.docx")
    (tmp_path / "x.parquet").write_bytes(b"not parquet")
    with pytest.raises(UserError, match="not a Parquet file"):
        open_source(tmp_path / "x.parquet")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UserError, match=r'pip install "limner\[data\]"'):
        open_source(tmp_path / "x.parquet")


def test_split(tmp_path):
    (tmp_path / "1.png").write_bytes(encode(picture(0)))
    rows = [{"caption": f"no {n}", "image": "1.png"} for n in range(4)]
    rows[1]["split"], rows[2]["split"] = "held-out", "train"
    path = table(tmp_path, "jsonl", rows)
    assert [s.captions[0] for s in open_source(path, split="train")] == ["no 0", "no 2", "no 3"]
    assert len(open_source(path, split="held-out")) == 1
    with pytest.raises(UserError, match='split "test"'):
        open_source(path, split="test")


def test_fingerprints_follow_the_files(folder):
    first = open_source(folder).fingerprint()
    assert open_source(folder).fingerprint() == first
    (folder / "part0/0.txt").write_text("another caption")
    assert open_source(folder).fingerprint() != first
