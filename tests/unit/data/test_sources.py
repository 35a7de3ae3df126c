"""Sources: the same samples from every layout, and a stable reason for every defect."""

import base64
import io
import json
import zlib

import numpy as np
import pytest
from PIL import Image

from limner.data import sources
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


# --------------------------------------------------------------------------------------- decoding


def test_modes_and_orientation():
    gray = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    rgb = np.stack([gray] * 3, 2)
    assert np.array_equal(decode_image(encode(gray)), rgb)
    wide = gray.astype(np.uint16) * 256 + 99
    assert np.array_equal(decode_image(encode(wide)), rgb)  # 16 bits keep their range
    assert np.array_equal(decode_image(encode(Image.fromarray(rgb).quantize(256))), rgb)
    bilevel = Image.fromarray(gray).point(lambda v: 255 * (v > 99), "1")
    assert set(decode_image(encode(bilevel)).ravel().tolist()) == {0, 255}
    alpha = np.dstack([rgb, np.repeat([[0], [255]], 4, 0) * np.ones((1, 8), int)]).astype(np.uint8)
    composed = decode_image(encode(alpha))
    assert (composed[:4] == 255).all() and np.array_equal(composed[4:], rgb[4:])
    palette = Image.fromarray(rgb).quantize(8)
    palette.info["transparency"] = palette.getpixel((0, 0))
    assert tuple(decode_image(encode(palette))[0, 0]) == (255, 255, 255)
    cmyk = encode(Image.new("CMYK", (9, 9), (0, 255, 255, 0)), "JPEG")
    assert decode_image(cmyk)[4, 4, 0] > 200 > 60 > decode_image(cmyk)[4, 4, 1]
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    turned = decode_image(encode(Image.new("RGB", (40, 8), "red"), "JPEG", exif=exif))
    assert turned.shape == (40, 8, 3)


@pytest.mark.parametrize("format", ["PNG", "WEBP", "BMP", "TIFF", "PPM", "GIF"])
def test_formats(format):
    options = {"lossless": True} if format == "WEBP" else {}
    image = np.full((6, 7, 3), 51, np.uint8)
    assert np.array_equal(decode_image(encode(image, format, **options)), image)


def test_broken_pictures():
    smooth = np.cumsum(np.cumsum(np.ones((64, 64, 3)), 0), 1).astype(np.uint8)
    for data in (b"", b"not a picture", encode(smooth)[:200], encode(smooth, "JPEG")[:400]):
        with pytest.raises(Rejected, match="^broken image$"):
            decode_image(data)
    with pytest.raises(Rejected, match="^broken image$"):
        decode_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [9_000, 60_000])
def test_bombs_are_refused_by_their_header(side):
    def chunk(kind, data):
        body = kind + data
        return len(data).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")

    header = side.to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 999))
    with pytest.raises(Rejected, match="^decompression bomb$"):
        decode_image(bomb)
    with pytest.raises(Rejected, match="^decompression bomb$"):
        decode_image(encode(picture(0, 100, 100), "JPEG"), max_pixels=9_999)


def photograph(height, width):
    y, x = np.mgrid[:height, :width] / 30
    waves = np.stack([np.sin(x + k) * np.cos(y * (k + 1)) for k in range(3)], 2)
    return (waves * 100 + 128).astype(np.uint8)


@pytest.mark.parametrize("target", [0, 20, 90])
def test_both_jpeg_decoders_agree(monkeypatch, target):
    """With and without the optional decoder: the same values, but for the economy in chroma."""
    pytest.importorskip("simplejpeg")
    for options in ({"quality": 95}, {"quality": 80, "subsampling": 0}, {"progressive": True}):
        data = encode(photograph(203, 301), "JPEG", **options)
        fast = decode_image(data, target=target)
        with monkeypatch.context() as context:
            context.setattr(sources, "simplejpeg", None)
            slow = decode_image(data, target=target)
        assert fast.shape == slow.shape
        difference = np.abs(fast.astype(int) - slow)
        assert difference.mean() < 1.5 if target else not difference.any()


def test_scaled_decoding_keeps_twice_the_target():
    data = encode(photograph(203, 301), "JPEG")
    shapes = {t: decode_image(data, target=t).shape[:2] for t in (0, 51, 50, 25, 12, 1)}
    assert shapes == {
        0: (203, 301),
        51: (203, 301),
        50: (102, 151),
        25: (51, 76),
        12: (26, 38),
        1: (26, 38),
    }
    again = decode_image(data, target=30, reuse=True)
    assert np.array_equal(again, decode_image(data, target=30))
