"""Sources: the same samples from every layout, and a stable reason for every defect."""

import base64
import errno
import io
import json
import os

import numpy as np
import pytest
from PIL import Image

from limner.data import open_source as module, sanitize, tables
from limner.data.image_decode import decode_image
from limner.data.open_source import open_source
from limner.data.prepare import prepare
from limner.data.sample import Rejected, describe_unread, group_by_split, select_split
from limner.errors import UserError
from no_filters import NO_FILTERS

CAPTIONS = ["a red square", "two cats, asleep", 'a sign, "hi"']


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


def test_a_picture_in_base64_may_be_no_larger_than_one_in_bytes(tmp_path, monkeypatch):
    data = encode(picture(0))
    monkeypatch.setattr(tables, "MAX_BYTES", len(data))
    rows = [{"image": base64.b64encode(some).decode(), "caption": "a"} for some in (data, data + b"\0")]
    source = open_source(table(tmp_path, "jsonl", rows))
    assert source[0].image == data
    with pytest.raises(Rejected, match="file too large"):
        source[1]


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


def test_a_glob_names_a_file_once_however_many_links_lead_to_it(folder):
    pattern = str(folder / "**/*.*")
    plain = [open_source(pattern).meta(i) for i in range(len(CAPTIONS))]
    (folder / "part1/loop").symlink_to("..")
    source = open_source(pattern)
    assert [source.meta(i) for i in range(len(source))] == plain
    (folder / "again").symlink_to("part0")
    assert sorted(caption for caption, _ in outcomes(open_source(pattern))) == sorted(CAPTIONS)


def test_captions_are_read_without_the_pictures(folder, tmp_path, monkeypatch):
    prepare(folder, tmp_path / "shards", filters=NO_FILTERS)
    rows = [{"caption": c, "image": f"part{n % 2}/{n}.png"} for n, c in enumerate(CAPTIONS)]
    rows += [{"caption": "outside", "image": "../x.png"}, {"caption": " ", "image": "part0/0.png"}]
    path = table(folder, "jsonl", rows)
    (folder / "part0/x.txt").write_text("no picture")
    sources = [open_source(path), open_source(tmp_path / "shards"), open_source(folder / "part0")]
    read = [outcomes(source) for source in sources]
    for picture in folder.rglob("*.png"):
        picture.unlink()
    sizes, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, offset: sizes.append(size) or pread(file, size, offset))
    assert [outcomes(source, captions=True) for source in sources] == [
        [outcome if isinstance(outcome, str) else outcome[0] for outcome in source] for source in read
    ]
    assert max(sizes) < 200  # bytes; a picture has more
    assert [outcome for source in read for outcome in source if isinstance(outcome, str)] == [
        "path outside the data folder", "empty caption", "missing image",
    ]  # fmt: skip
    assert set(outcomes(sources[0])) == {"missing image", "path outside the data folder", "empty caption"}


def test_hidden_folders_are_not_read(folder):
    for name in (".ipynb_checkpoints", "part0/.thumbnails/normal"):
        (folder / name).mkdir(parents=True)
        (folder / name / "1.png").write_bytes(encode(picture(1)))
        (folder / name / "1.txt").write_text("a small copy")
    assert len(open_source(folder)) == len(CAPTIONS)
    assert len(open_source(folder / ".ipynb_checkpoints")) == 1  # but for the one that is named


def test_columns(folder):
    rows = [{"words": c, "where": f"part{n % 2}/{n}.png"} for n, c in enumerate(CAPTIONS)]
    path = table(folder, "jsonl", rows)
    check(open_source(path, caption="words", image="where"))
    with pytest.raises(UserError, match="words, where"):
        open_source(path)
    with pytest.raises(UserError, match='lacks the column "word"'):
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


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_fingerprints_follow_the_pictures_that_a_table_names(tmp_path, kind):
    """Or else tokens of the pictures of before would be trained on."""
    rows = [{"caption": f"no {n}", "image": f"{n}.png"} for n in range(3)]  # of the last one there is no picture
    for n in range(2):
        (tmp_path / f"{n}.png").write_bytes(encode(picture(n)))
    path = table(tmp_path, kind, rows)
    seen = [open_source(path).fingerprint()]
    assert open_source(path).fingerprint() == seen[0]
    for n in (1, 2):
        (tmp_path / f"{n}.png").write_bytes(encode(picture(n + 5, height=30)))
        seen.append(open_source(path).fingerprint())
    assert len(set(seen)) == 3


def test_a_table_that_holds_its_pictures_is_not_read_for_its_fingerprint(tmp_path, monkeypatch):
    path = table(tmp_path, "parquet", [{"caption": f"no {n}", "image": encode(picture(n))} for n in range(6)])
    source, read = open_source(path), []
    monkeypatch.setattr(tables.TableSource, "row", lambda self, index: read.append(index) or (0, {"image": b"a"}))
    source.fingerprint()
    assert read == [0]


# -------------------------------------------------------------------------------------- strangers


def outcomes(source, captions=False):
    """For each element its first caption (and its split, if the sample is read), or why it is rejected."""
    found = []
    for index in range(len(source)):
        try:
            if captions:
                found.append(source.captions(index)[0])
                continue
            sample = source[index]
            found.append((sample.captions[0], sample.meta.get("split")))
        except Rejected as rejected:
            found.append(rejected.reason)
    return found


def test_a_folder_of_anything(tmp_path):
    good = encode(picture(0))
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("a", "b", "c", "d", "e", "f", "h"):
        (folder / f"{name}.txt").write_text(f"caption {name}")
    (folder / "a.png").symlink_to("a.png")
    (folder / "b.png").symlink_to("nowhere")
    os.mkfifo(folder / "c.png")
    (folder / "d.png").symlink_to("/dev/zero")
    (folder / "e.png").mkdir()
    (folder / "f.png").write_bytes(good)
    (folder / "f.txt").unlink()
    os.mkfifo(folder / "f.txt")
    (folder / "g.png").write_bytes(good)
    (folder / "g.txt").symlink_to("/dev/zero")
    (folder / "h.png").write_bytes(good)
    (folder / "h.jpg").write_bytes(good)
    (folder / "loop").symlink_to(folder)
    for suffix, data in ((b"png", good), (b"txt", b"odd name")):
        with open(os.fsencode(folder) + b"/z\xff." + suffix, "wb") as file:
            file.write(data)
    source = open_source(folder)
    assert outcomes(source) == [
        *["missing image"] * 5,
        *["missing caption"] * 2,
        ("caption h", None),
        "duplicate picture name",
        ("odd name", None),
    ]
    assert len(source.fingerprint()) == 64
    assert source.meta(9)["path"].endswith("z\\udcff.png")
    counts = prepare(source, tmp_path / "out", filters=NO_FILTERS)
    assert counts.kept == 2 and counts.total == len(source) == 10


@pytest.mark.parametrize("kind", ["tar", "parquet", "arrow", "csv", "jsonl", "png"])
def test_a_path_that_never_ends_raises_an_error(tmp_path, kind):
    path = tmp_path / f"x.{kind}"
    for make in (os.mkfifo, lambda p: p.symlink_to("/dev/zero"), lambda p: p.symlink_to(p.name)):
        make(path)
        with pytest.raises(UserError, match="not a regular file"):
            open_source(path)
        path.unlink()


def test_a_sample_that_fails_in_any_way_is_one_rejection(folder, monkeypatch, tmp_path):
    source = open_source(folder)
    monkeypatch.setattr(module, "parse_captions", lambda text: (text.decode(),) if b"cats" not in text else 1 / 0)
    assert sorted(map(str, outcomes(source)))[2] == "unreadable sample"
    assert prepare(source, tmp_path / "out", filters=NO_FILTERS).rejected == {"unreadable sample": 1}
    with pytest.raises(IndexError):
        source[3]


@pytest.mark.parametrize("fault", [OSError(errno.EMFILE, "Too many open files"), ImportError("torn"), UserError("no")])
def test_a_fault_of_the_machine_is_not_one_of_a_sample(folder, monkeypatch, tmp_path, fault):
    def fails(*_):
        raise fault

    source = open_source(folder)
    monkeypatch.setattr(sanitize, "open_regular", fails)
    with pytest.raises(type(fault), match=str(fault.args[-1])):
        prepare(source, tmp_path / "out", filters=NO_FILTERS)


def hugging_face_rows(start, stop):
    return [{"image": {"bytes": encode(picture(n)), "path": f"{n}.png"}, "text": f"no {n}"} for n in range(start, stop)]


def test_a_clone_of_hugging_face(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    clone = tmp_path / "test-clone"
    (clone / "data").mkdir(parents=True)
    (clone / "README.md").write_text("---")
    (clone / ".gitattributes").write_text("*.parquet lfs")
    names = ["train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001", "test-00000-of-00001"]
    for n, name in enumerate(names):
        parquet.write_table(
            pyarrow.Table.from_pylist(hugging_face_rows(2 * n, 2 * n + 2)), clone / f"data/{name}.parquet"
        )
    expected = {(f"no {n}", "train" if n < 4 else "held-out") for n in range(8)}
    for path in (clone, clone / "data", f"{clone}/data/*.parquet"):
        assert set(outcomes(open_source(path))) == expected
        assert len(open_source(path, split="held-out")) == 4
    assert outcomes(open_source(clone / "data/test-00000-of-00001.parquet")) == [("no 6", None), ("no 7", None)]


def save_to_disk(folder, rows):
    """Write the files of `datasets.Dataset.save_to_disk`."""
    pyarrow = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True)
    name, rows = "data-00000-of-00001.arrow", pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(folder / name, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=2)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}], "_split": None}))
    (folder / "dataset_info.json").write_text("{}")
    (folder / "cache-1234.arrow").write_bytes(b"what map leaves")


def test_save_to_disk(tmp_path):
    save_to_disk(tmp_path / "one", hugging_face_rows(0, 5))
    assert outcomes(open_source(tmp_path / "one")) == [(f"no {n}", None) for n in range(5)]
    for name, start in (("train", 0), ("test", 3), ("extra", 6)):
        save_to_disk(tmp_path / "three" / name, hugging_face_rows(start, start + 3))
    splits = ["train", "test", "extra", "../one", "x" * 999, 5]
    (tmp_path / "three/dataset_dict.json").write_text(json.dumps({"splits": splits}))
    names = {0: "train", 1: "held-out", 2: "extra"}
    assert outcomes(open_source(tmp_path / "three")) == [(f"no {n}", names[n // 3]) for n in range(9)]
    (tmp_path / "one/state.json").write_text('{"_data_files": [{"filename": "../three/train/x.arrow"}, 7]}')
    with pytest.warns(UserWarning, match="cache-1234.arrow is not an Arrow file"):
        source = open_source(tmp_path / "one")  # as a folder of tables
    assert outcomes(source) == ["damaged table", *((f"no {n}", None) for n in range(5))]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_an_imagefolder_with_splits(tmp_path, kind):
    for split in ("train", "validation"):
        (tmp_path / split).mkdir()
        for n in range(2):
            (tmp_path / split / f"{n}.png").write_bytes(encode(picture(n)))
        rows = [{"file_name": f"{n}.png", "text": f"{split} {n}"} for n in range(2)]
        table(tmp_path / split, kind, rows).rename(tmp_path / split / f"metadata.{kind}")
    assert outcomes(open_source(tmp_path)) == [
        *((f"train {n}", "train") for n in range(2)),
        *((f"validation {n}", "held-out") for n in range(2)),
    ]


def test_shards_in_folders_name_their_split(folder, tmp_path):
    for split in ("train", "val"):
        prepare(folder, tmp_path / "shards" / split, filters=NO_FILTERS, held_out=0)
    found = outcomes(open_source(tmp_path / "shards"))
    assert len(found) == 6 and {split for _, split in found} == {"train", "held-out"}


def test_every_split_is_read_or_reported(tmp_path):
    (tmp_path / "1.png").write_bytes(encode(picture(0)))
    names = ["train", "Training", None, "", "test", "VAL", "validation", "held-out", "dev", "extra", "extra"]
    rows = [{"caption": f"no {n}", "image": "1.png", "split": name} for n, name in enumerate(names)]
    rows += [{"caption": "x", "image": "1.png", "split": split} for split in (["a"], 3, True, {})]
    source = open_source(table(tmp_path, "jsonl", rows))
    splits = {name: len(chosen) for name, chosen in group_by_split(source).items()}
    # What cannot be read is for training: it is rejected there, and counted.
    assert splits == {"train": 8, "held-out": 5, "extra": 2}
    assert (
        describe_unread(splits) == '2 samples are never read: their split ("extra") is neither "train" nor "held-out"'
    )
    assert describe_unread({"train": 3, "held-out": 1}) == ""
    assert outcomes(select_split(source, "train"))[4:] == ["broken metadata"] * 4


@pytest.mark.parametrize("seed", range(8))
def test_every_picture_in_a_folder_is_kept_or_counted(tmp_path, seed):
    rng = np.random.default_rng(seed)
    good, names = encode(picture(0)), []
    for _ in range(40):
        name = f"{rng.integers(3)}/{rng.integers(9)}.{rng.choice(['png', 'jpg', 'JPG', 'txt', 'md'])}"
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.choice([good, b"a caption", b""]))
        names.append(name)
    names = set(names)
    pictures = {n for n in names if n.lower().endswith(("png", "jpg"))}
    alone = {n for n in names if n.endswith("txt")} - {n.rpartition(".")[0] + ".txt" for n in pictures}
    source = open_source(tmp_path / "in")
    assert len(outcomes(source)) == len(pictures) + len(alone)
    decodable = 0
    for index in range(len(source)):
        try:
            decode_image(source[index].image)
            decodable += 1
        except Rejected:
            pass
    if decodable:
        counts = prepare(source, tmp_path / "out", filters=NO_FILTERS)
        assert (counts.kept, counts.total) == (decodable, len(source))
        assert json.loads((tmp_path / "out/dataset.json").read_text())["count"] == len(source)
