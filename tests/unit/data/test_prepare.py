"""Preparing: bad samples are skipped and counted, good ones survive unharmed."""

import io
import zlib
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from limner.data.filters import Filters
from limner.data.image_decode import decode_image
from limner.data.open_source import open_source
from limner.data.prepare import prepare
from limner.data.shard_writer import Counts
from limner.errors import UserError
from no_filters import NO_FILTERS


def png(height=8, width=9, seed=0, format="PNG", **options):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format, **options)
    return buffer.getvalue()


def bomb():
    def chunk(kind, data):
        body = kind + data
        return len(data).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")

    header = (1 << 14).to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"")


@pytest.fixture
def messy(tmp_path):
    folder = tmp_path / "messy"
    folder.mkdir()
    samples = [
        (png(seed=1), b"a good picture"),
        (png(seed=2, format="JPEG"), b"another good picture"),
        (png(seed=3)[:60], b"a broken picture"),
        (png(), None),
        (png(), b"\xff\xfe\xfd"),
        (png(), b"  "),
        (bomb(), b"a decompression bomb"),
        (png(), b"dog"),
        (png(), b"ein roter Kreis auf einem blauen Quadrat"),
        (png(), b"Photographed on 12 May 2010"),
        (png(8, 17), b"a very wide picture"),
        (png(17, 8), b"a very tall picture"),
        (png(seed=4, format="BMP"), b"a picture in another format"),
    ]
    for n, (image, text) in enumerate(samples):
        (folder / f"{n:02}.png").write_bytes(image)
        if text is not None:
            (folder / f"{n:02}.txt").write_bytes(text)
    return folder


REJECTED = {
    "aspect ratio": 2,
    "broken image": 1,
    "missing caption": 1,
    "caption is not UTF-8": 1,
    "empty caption": 1,
    "decompression bomb": 1,
    "caption too short": 1,
    "caption not English": 1,
    "caption is boilerplate": 1,
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_every_defect_is_counted(messy, tmp_path):
    calls = []
    counts = prepare(messy, tmp_path / "out", progress=calls.append)
    assert counts == Counts(3, Counter(REJECTED), Counter({"train": 2, "held-out": 1}))
    assert calls == [1] * 13
    source = open_source(tmp_path / "out")
    assert [source[n].captions[0] for n in range(3)] == [
        "a good picture",
        "another good picture",
        "a picture in another format",
    ]
    # Formats that shards know are copied byte for byte, others become PNGs.
    assert [source[n].image for n in range(2)] == [png(seed=1), png(seed=2, format="JPEG")]
    assert np.array_equal(decode_image(source[2].image), decode_image(png(seed=4)))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_filters_are_optional_and_threads_do_not_matter(messy, tmp_path):
    counts = prepare(messy, tmp_path / "a", filters=NO_FILTERS, threads=1)
    assert counts.kept == 8 and counts.total == 13
    prepare(messy, tmp_path / "b", filters=NO_FILTERS, threads=5)
    assert (tmp_path / "a/00000.tar").read_bytes() == (tmp_path / "b/00000.tar").read_bytes()
    # What was prepared prepares again, to the same.
    prepare(tmp_path / "a", tmp_path / "c", filters=NO_FILTERS)
    again, first = open_source(tmp_path / "c"), open_source(tmp_path / "a")
    assert [again[n] for n in range(8)] == [first[n] for n in range(8)]


def test_some_samples_are_held_out(tmp_path):
    (tmp_path / "in").mkdir()
    for n in range(60):
        (tmp_path / f"in/{n:02}.png").write_bytes(png(seed=n))
        (tmp_path / f"in/{n:02}.txt").write_text(f"a picture of {n} things")
    counts = prepare(tmp_path / "in", tmp_path / "out", filters=NO_FILTERS)
    assert counts.splits == {"train": 58, "held-out": 2}
    assert len(open_source(tmp_path / "out", split="held-out")) == 2
    assert prepare(tmp_path / "in", tmp_path / "all", filters=NO_FILTERS, held_out=0.0).splits == {}
    # A split that is named stays.
    assert prepare(tmp_path / "out", tmp_path / "again", filters=NO_FILTERS, held_out=0.5).splits == counts.splits


def test_size_bounds_the_shorter_side(tmp_path):
    (tmp_path / "in").mkdir()
    for n, (h, w) in enumerate([(40, 60), (60, 40), (10, 15), (21, 22)]):
        (tmp_path / f"in/{n}.jpg").write_bytes(png(h, w, format="JPEG"))
        (tmp_path / f"in/{n}.txt").write_text(f"picture number {n}")
    prepare(tmp_path / "in", tmp_path / "out", size=20, filters=Filters(english=None))
    source = open_source(tmp_path / "out")
    assert [decode_image(s.image).shape[:2] for s in source] == [
        (20, 30),
        (30, 20),
        (10, 15),
        (20, 21),
    ]
    assert all(sample.image.startswith(b"\xff\xd8") for sample in source)


def test_nothing_good_is_a_mistake(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/1.png").write_bytes(b"broken")
    (tmp_path / "in/1.txt").write_text("a caption")
    with pytest.raises(UserError, match="broken image: 1"):
        prepare(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out/dataset.json").exists()


def test_the_table():
    text = str(Counts(1200, Counter({"broken image": 3, "caption too short": 40})))
    assert text.splitlines() == [
        "kept                         1,200   96.5%",
        "rejected: caption too short     40    3.2%",
        "rejected: broken image           3    0.2%",
    ]
