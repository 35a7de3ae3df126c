"""Decoding: the same values from every format, and bounds on time and memory for any header."""

import importlib
import io
import os
import struct
import subprocess
import sys
import threading
import time
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps, WebPImagePlugin, features

from limner.data import image_decode
from limner.data.image_decode import Budget, decode_image, decoded
from limner.data.sample import Rejected
from limner.errors import UserError


def encode(array, format="PNG", **options):
    buffer = io.BytesIO()
    image = array if isinstance(array, Image.Image) else Image.fromarray(array)
    image.save(buffer, format, **options)
    return buffer.getvalue()


def picture(seed, height=20, width=24):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


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


def test_floating_point_pixels_are_rejected_since_they_may_go_to_1_or_255():
    with pytest.raises(Rejected, match="floating-point pixels"):
        decode_image(encode(np.full((9, 9), 0.5, np.float32), "TIFF"))


@pytest.mark.parametrize("fast", [True, False])
def test_orientation_may_also_be_in_xmp(monkeypatch, fast):
    if not fast:
        monkeypatch.setattr(image_decode, "simplejpeg", None)
    xmp = (
        b'<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description '
        b'xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/></rdf:RDF>'
    )
    assert decode_image(encode(Image.new("RGB", (40, 8)), "JPEG", xmp=xmp)).shape == (40, 8, 3)


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
@pytest.mark.parametrize("lacks", ["reader", "decoder", "import"])
def test_a_picture_is_not_broken_where_pillow_is(monkeypatch, lacks):
    """Pillow leaves out what it cannot import, and says of such pictures that it does not know them."""
    webp, broken = encode(picture(0), "WEBP"), encode(picture(0))[:60]
    Image.init()
    image_decode.require_formats.cache_clear()
    if lacks == "reader":
        monkeypatch.delitem(Image.OPEN, "WEBP")
    elif lacks == "decoder":
        monkeypatch.setattr(WebPImagePlugin, "SUPPORTED", False)
        monkeypatch.setattr(features, "check", lambda name: name != "webp")
    else:
        monkeypatch.setattr(Image, "open", lambda *_, **__: importlib.import_module("no_such_plugin"))
    with pytest.raises(ImportError if lacks == "import" else UserError, match="no_such|Pillow lacks WEBP|lacks webp"):
        decode_image(webp)
    monkeypatch.undo()
    with pytest.raises(Rejected, match="broken image"):
        decode_image(broken)


@pytest.mark.parametrize("side", [9_000, 60_000])
def test_bombs_are_rejected_by_their_header(side, monkeypatch):
    def chunk(kind, data):
        body = kind + data
        return len(data).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")

    header = side.to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 999))
    with pytest.raises(Rejected, match="^decompression bomb$"):
        decode_image(bomb)
    monkeypatch.setattr(image_decode, "MAX_PIXELS", 9_999)
    with pytest.raises(Rejected, match="^decompression bomb$"):
        decode_image(encode(picture(0, 100, 100), "JPEG"))


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
            context.setattr(image_decode, "simplejpeg", None)
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
    with decoded(data, target=30, reuse=True) as again:
        assert np.array_equal(again, decode_image(data, target=30))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientations_are_those_of_pillow(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(picture(orientation, 9, 14), "PNG", exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert np.array_equal(decode_image(data), np.asarray(expected))


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "LA", "I;16", "1"])
def test_strips_change_nothing(monkeypatch, mode):
    colors = Image.fromarray(picture(1, 50, 40))
    image = colors.quantize(9) if mode == "P" else colors.convert("I" if mode == "I;16" else mode)
    data = encode(image.convert(mode), transparency=2) if mode == "P" else encode(image.convert(mode))
    whole = decode_image(data)
    monkeypatch.setattr(image_decode, "PIXELS_PER_STRIP", 130)
    assert np.array_equal(decode_image(data), whole)


def repeat_last_scan(data, times):
    at = data.rindex(b"\xff\xda")
    return data[:at] + data[at:-2] * times + data[-2:]


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("exif", [b"", b"Exif\0\0junk"])
def test_repeated_scans_are_rejected_before_they_are_decoded(monkeypatch, fast, exif):
    if not fast:
        monkeypatch.setattr(image_decode, "simplejpeg", None)
    data = encode(photograph(600, 800), "JPEG", progressive=True)
    if exif:
        data = data[:2] + b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif + data[2:]
    assert decode_image(data).shape == (600, 800, 3)
    with monkeypatch.context() as undecoded:
        for decoder in ("_decode_jpeg", "_decode_with_pillow"):
            undecoded.setattr(image_decode, decoder, None)
        with pytest.raises(Rejected, match="^too many scans$"):
            decode_image(repeat_last_scan(data, 1000))
    # A large picture may have fewer.
    monkeypatch.setattr(image_decode, "MAX_SCANNED", 600 * 800 * 12)
    with pytest.raises(Rejected, match="^too many scans$"):
        decode_image(repeat_last_scan(data, 6))
    # Of one scan for all components no more is decoded, and nothing is counted.
    plain = encode(photograph(60, 80), "JPEG", comment=b"\xff\xda" * 200)
    assert decode_image(plain).shape == (60, 80, 3)


def test_scans_of_a_file_of_several_jpegs_are_counted(monkeypatch):
    exif = Image.Exif()
    exif[0x0112] = 1
    two = {"save_all": True, "append_images": [Image.fromarray(picture(1))]}
    data = encode(picture(0), "MPO", progressive=True, exif=exif, **two)
    assert decode_image(data).shape == (20, 24, 3)
    monkeypatch.setattr(image_decode, "MAX_SCANS", 5)
    with pytest.raises(Rejected, match="^too many scans$"):
        decode_image(data)


def test_scans_of_a_jpeg_in_a_tiff_are_counted():
    data = encode(photograph(64, 64), "JPEG", progressive=True)
    data = repeat_last_scan(data, 100)

    def tag(number, kind, value):
        return (
            number.to_bytes(2, "little")
            + kind.to_bytes(2, "little")
            + (1).to_bytes(4, "little")
            + value.to_bytes(4, "little")
        )

    tags = [(256, 4, 64), (257, 4, 64), (258, 3, 8), (259, 3, 7), (262, 3, 6), (273, 4, 8), (277, 3, 3), (278, 4, 64),
            (279, 4, len(data)), (284, 3, 1)]  # fmt: skip
    directory = len(tags).to_bytes(2, "little") + b"".join(tag(*t) for t in tags) + bytes(4)
    tiff = b"II*\0" + (8 + len(data)).to_bytes(4, "little") + data + directory
    with pytest.raises(Rejected, match="^too many scans$"):
        decode_image(tiff)


@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize(("tag", "kind"), [(273, 1), (324, 3), (339, 5)])  # strips, tiles, what pixels are
def test_numbers_in_a_tiff_are_counted_before_it_is_opened(big, tag, kind):
    """Two megabytes of one-byte offsets of strips would take ten seconds."""
    order, count = "<", (1 << 20) + 1
    tags = [(256, 4, 1, 8), (257, 4, 1, 8), (tag, kind, count, 200)]
    entries = b"".join(struct.pack(order + ("HHQQ" if big else "HHII"), *values) for values in tags)
    header = b"II+\0\x08\0\0\0" + struct.pack("<QQ", 16, 3) if big else b"II*\0" + struct.pack("<IH", 8, 3)
    data = header + entries + bytes(200) + b"\1" * 8 * count
    begun = time.process_time()
    with pytest.raises(Rejected, match="^too many strips$"):
        decode_image(data)
    assert time.process_time() - begun < 0.5
    for offset in (8, 15, 2**32 - 1):  # a directory that is cut off, or not there
        with pytest.raises(Rejected, match="^broken image$"):
            decode_image(b"II*\0" + offset.to_bytes(4, "little") + b"\3\0\0\1")


def test_slow_formats_have_a_lower_bound_of_bytes():
    side = 3_000
    text = b"P3\n%d %d\n255\n" % (side, side) + b"0 " * (3 * side * side)
    with pytest.raises(Rejected, match="^file too large$"):
        decode_image(text)


def test_long_sides_are_rejected():
    with pytest.raises(Rejected, match="^decompression bomb$"):
        decode_image(encode(np.zeros((1, 70_000, 3), np.uint8)))


def test_a_webp_is_measured_before_it_is_opened(monkeypatch):
    for options in ({}, {"lossless": True}, {"exif": b"Exif\0\0"}):
        data = encode(picture(0, 30, 50), "WEBP", **options)
        assert image_decode.webp_size(data) == (50, 30)
    monkeypatch.setattr(Image, "open", None)  # not called
    monkeypatch.setattr(image_decode, "MAX_PIXELS", 1_000)
    with pytest.raises(Rejected, match="^decompression bomb$"):
        decode_image(data)


def test_random_damage_never_raises_anything_else():
    rng = np.random.default_rng(0)
    smooth = photograph(40, 56)
    whole = [encode(smooth, f) for f in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")]
    whole += [encode(smooth, "JPEG", progressive=True), encode(Image.fromarray(smooth).convert("CMYK"), "JPEG")]
    for trial in range(300):
        data = bytearray(whole[trial % len(whole)])
        for at in rng.integers(0, min(len(data), 400), int(rng.integers(1, 6))):
            data[at] = rng.integers(256)
        try:
            image = decode_image(bytes(data[: rng.integers(1, len(data) + 1)] if trial % 3 == 0 else data))
        except Rejected:
            continue
        assert image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3


def test_a_budget_is_shared_in_turn():
    budget, most, lock = Budget(10), [0], threading.Lock()

    def work(size):
        for _ in range(20):
            with budget.reserve(size):
                with lock:
                    most[0] = max(most[0], budget.used)
                assert budget.used <= 10 or size == 25

    threads = [threading.Thread(target=work, args=(size,)) for size in (3, 4, 5, 9, 25)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert budget.used == 0 and 9 < most[0] <= 25
    with pytest.raises(KeyError), budget.reserve(4):
        raise KeyError
    assert budget.used == 0


MANY = """
import sys
from concurrent.futures import ThreadPoolExecutor
from limner.data.image_decode import decoded

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) // 1024

def work(path):
    with open(path, "rb") as file, decoded(file.read()) as image:
        return image.shape

before = peak()
with ThreadPoolExecutor(8) as pool:
    shapes = set(pool.map(work, sys.argv[1:]))
print(peak() - before, shapes)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads the peak from /proc")
def test_threads_decode_large_pictures_within_the_budget(tmp_path):
    side = 4096
    for n in range(6):
        (tmp_path / f"{n}.png").write_bytes(
            encode(Image.new("LA" if n % 2 else "I;16", (side, side)), compress_level=1)
        )
    script = MANY.replace(
        "before = peak()",
        f"from limner.data import image_decode; image_decode.BUDGET.total = {200 << 20}; before = peak()",
    )
    run = [sys.executable, "-c", script, *map(str, sorted(tmp_path.iterdir()))]
    source = os.path.dirname(os.path.dirname(os.path.dirname(image_decode.__file__)))
    # A fixed threshold returns freed memory immediately, so that the peak does not depend on how glibc reuses it.
    environment = {**os.environ, "PYTHONPATH": source, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run(run, capture_output=True, text=True, env=environment, check=True)
    used, shapes = done.stdout.split(maxsplit=1)
    assert shapes.strip() == f"{{({side}, {side}, 3)}}"
    assert int(used) < 200  # MiB: 131 measured, and 600 if all six are decoded together
