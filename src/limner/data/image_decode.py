"""Decode untrusted pictures in bounded time and memory.

The decoder reads a picture's size from its header before it allocates pixels. It accepts only plain
raster formats (Pillow's EPS reader, for example, would start Ghostscript). It also computes the memory
of decoding from the header: a thread waits until this fits into `BUDGET` together with the pictures of
other threads. A picture larger than `BUDGET` is decoded alone.
"""

from __future__ import annotations

import io
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from PIL import Image, features

from limner.data.sample import Rejected
from limner.data.sanitize import is_environment_error
from limner.errors import UserError

simplejpeg: Any
try:
    import simplejpeg
except ImportError:  # optional: Pillow decodes the same values, more slowly
    simplejpeg = None

MAX_PIXELS = 1 << 26  # 8192 x 8192; a header that claims more counts as a decompression bomb
MAX_SIDE = 1 << 16
#: Most scans of a JPEG (encoders write about ten), and most scans times pixels: a scan covers all pixels.
MAX_SCANS, MAX_SCANNED = 64, 16 * MAX_PIXELS
_MAX_SLOW_BYTES = 1 << 24  # bytes of a file that Pillow decodes in Python: plain-text PPM, run-length encoded BMP
_MAX_TIFF_VALUES = 1 << 20  # in the directory of a TIFF
_BYTE_TYPES = (1, 2, 6, 7)  # TIFF types with values of one byte
_STRIP_TAGS = (273, 279, 324, 325)  # TIFF tags: offsets and lengths of strips and tiles
PIXELS_PER_STRIP = 1 << 20  # pixels per conversion
_MAX_REUSED_BYTES = 1 << 25  # bytes of the largest buffer that is kept
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_DECODERS = ("jpg", "zlib", "libtiff", "webp")
#: Bytes per pixel of each decoder, without Pillow's picture and the result (measured at 8192 x 8192).
_BYTES_PER_PIXEL = {"JPEG": 8, "WEBP": 16, "TIFF": 8, "GIF": 8, "PNG": 2, "BMP": 4, "PPM": 4}
_ORIENTATION_MARKS = (b"Exif\0", b"tiff:Orientation")  # marks of an orientation in a JPEG, which Pillow reads
_local = threading.local()


class Budget:
    """A memory budget, in bytes, that threads share. A thread waits until its bytes are free. If no other thread holds
    bytes, it never waits, even for more than the total."""

    def __init__(self, total: int) -> None:
        self.total, self.used = total, 0
        self._queue, self._released = threading.Lock(), threading.Condition()

    @contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """Hold `size` bytes for the block."""
        with self._queue, self._released:
            while self.used and self.used + size > self.total:
                self._released.wait()
            self.used += size
        try:
            yield
        finally:
            with self._released:
                self.used -= size
                self._released.notify()


BUDGET = Budget(1 << 30)


def decode_image(data: bytes, *, max_pixels: int = MAX_PIXELS, target: int = 0) -> np.ndarray:
    """Decode a picture to uint8 [H, W, 3]: sRGB values, upright, blended onto white.

    `target` is explained at `decoded`. Raises `Rejected`: "broken image", "decompression bomb" if the header claims
    more than `max_pixels`, "too many scans", "too many strips", "file too large" for slow formats, or "floating-point
    pixels", since their value of white is unknown.
    """
    with decoded(data, max_pixels=max_pixels, target=target) as image:
        return image


@contextmanager
def decoded(data: bytes, *, max_pixels: int = MAX_PIXELS, target: int = 0, reuse: bool = False) -> Iterator[np.ndarray]:
    """`decode_image` as a context manager: the picture holds its share of `BUDGET` until the block ends.

    With `target` > 0 the caller promises to resize the picture by area to a shorter side of at most `target` pixels.
    JPEGs then decode faster:

    - at 1/2, 1/4 or 1/8 of their size, if the shorter side remains at least twice the target;
    - with repeated instead of interpolated chroma, if the shorter side remains at least 1.5 times the target, since
      resizing averages chroma again.

    With `reuse`, this thread's next call may overwrite the result.
    """
    multiscan = False
    if data[:2] == b"\xff\xd8":
        multiscan = _has_several_scans(data)
        if simplejpeg is not None and not any(mark in data[:65536] for mark in _ORIENTATION_MARKS):
            header = _jpeg_header(data)
            if header is not None:
                height, width = header
                _check_pixels(width, height, max_pixels)
                _check_scans(data, multiscan, width * height)
                scale = _jpeg_scale(width, height, target)
                needed = 3 * height * width // scale**2 + multiscan * _BYTES_PER_PIXEL["JPEG"] * height * width
                with BUDGET.reserve(needed):
                    image = _decode_jpeg(data, height, width, target, reuse)
                    if image is not None:
                        yield image
                        return
    size = webp_size(data)
    if size is not None:  # Pillow allocates memory for a whole WebP on opening
        _check_pixels(*size, max_pixels)
        with BUDGET.reserve(size[0] * size[1] * (_BYTES_PER_PIXEL["WEBP"] + 7)):
            yield _decode_with_pillow(_open(data, max_pixels))
        return
    if _count_tiff_values(data) > _MAX_TIFF_VALUES:
        raise Rejected("too many strips")
    picture = _open(data, max_pixels)
    _check_scans(data, multiscan, picture.width * picture.height)  # also for MPO: several JPEGs in one file
    if len(data) > _MAX_SLOW_BYTES and _is_slow(data):
        raise Rejected("file too large")
    if picture.mode == "F":
        raise Rejected("floating-point pixels")
    if picture.format == "TIFF" and _jpegs_in_tiff(picture) < data.count(b"\xff\xda"):
        raise Rejected("too many scans")
    needed = picture.width * picture.height * (_BYTES_PER_PIXEL.get(picture.format or "", 8) + 7)
    with BUDGET.reserve(needed):
        scale = _jpeg_scale(*picture.size, target)
        if picture.format == "JPEG" and scale > 1:
            picture.draft(None, (picture.width // scale, picture.height // scale))
        yield _decode_with_pillow(picture)


def _open(data: bytes, max_pixels: int) -> Image.Image:
    try:
        picture = Image.open(io.BytesIO(data), formats=_FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise Rejected("decompression bomb") from None
    except Exception as error:  # Pillow's readers raise OSError, SyntaxError, struct.error ...
        raise _as_rejection(error) from None
    _check_pixels(*picture.size, max_pixels)
    return picture


def _decode_with_pillow(picture: Image.Image) -> np.ndarray:
    try:
        picture.load()
        orient = _ORIENTATIONS.get(picture.getexif().get(0x0112, 1))
        rows = max(1, PIXELS_PER_STRIP // picture.width)
        if rows >= picture.height:
            image = np.asarray(to_rgb(picture))
        else:  # in strips, since each of Pillow's conversions copies its whole input
            image = np.empty((picture.height, picture.width, 3), np.uint8)
            for top in range(0, picture.height, rows):
                bottom = min(top + rows, picture.height)
                image[top:bottom] = np.asarray(to_rgb(picture.crop((0, top, picture.width, bottom))))
        picture.close()
        return np.ascontiguousarray(orient(image)) if orient else image
    except Exception as error:
        raise _as_rejection(error) from None


def _as_rejection(error: Exception) -> Exception:
    """Return the exception for a failure of Pillow. Raises `UserError` if Pillow lacks a format."""
    if is_environment_error(error):
        return error
    require_formats()
    return Rejected("broken image")


@cache
def require_formats() -> None:
    """Raise `UserError` if Pillow lacks a reader or a decoder: Pillow skips those that it cannot import."""
    Image.init()
    missing = [name for name in _FORMATS if name not in Image.OPEN]
    missing += [name for name in _DECODERS if not features.check(name)]
    if missing:
        raise UserError(
            f"Pillow lacks {', '.join(missing)}, so valid pictures may be rejected as broken: install a wheel with "
            "pip install --force-reinstall --only-binary :all: pillow"
        )


#: The transform of [H, W, 3] for each EXIF orientation.
_ORIENTATIONS = {
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a),
}


def _jpeg_header(data: bytes) -> tuple[int, int] | None:
    """Height and width of a JPEG, or None if simplejpeg cannot decode it."""
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    return (height, width) if space in ("YCbCr", "Gray", "RGB") else None


def _decode_jpeg(data: bytes, height: int, width: int, target: int, reuse: bool) -> np.ndarray | None:
    """Decode with simplejpeg; return None on failure, for Pillow to try."""
    scale = _jpeg_scale(width, height, target)
    height, width = -(-height // scale), -(-width // scale)
    buffer, size = None, height * width * 3
    if reuse and size <= _MAX_REUSED_BYTES:  # new memory pages for each picture would take 10% of the decoding time
        if len(getattr(_local, "pixels", ())) < size:
            _local.pixels = np.empty(size, np.uint8)
        buffer = _local.pixels[:size]
    try:
        return simplejpeg.decode_jpeg(
            data,
            fastupsample=bool(target) and min(height, width) >= 1.5 * target,
            min_height=height,
            min_width=width,
            min_factor=scale,
            buffer=buffer,
        )
    except Exception:  # ValueError, or a MemoryError
        return None


def _check_pixels(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels or max(width, height) > MAX_SIDE:
        raise Rejected("decompression bomb")
    if width < 1 or height < 1:
        raise Rejected("broken image")


def _check_scans(data: bytes, multiscan: bool, pixels: int) -> None:
    if multiscan:
        scans = data.count(b"\xff\xda")  # compressed data escapes 0xff with a zero
        if scans > MAX_SCANS or scans * pixels > MAX_SCANNED:
            raise Rejected("too many scans")


def _has_several_scans(data: bytes) -> bool:
    """Return True if a JPEG may have several scans: it is progressive, or its first scan lacks a component. Reads only
    the segments before the first scan."""
    at, components, sequential = 2, 0, False
    while at + 10 < len(data) and data[at] == 0xFF:
        kind = data[at + 1]
        if kind == 0xFF:
            at += 1
            continue
        if kind == 0xDA:
            return not sequential or data[at + 4] < components
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            components, sequential = data[at + 9], kind in (0xC0, 0xC1)
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return True


def _jpegs_in_tiff(picture: Any) -> int:
    """Most scans of a TIFF: `MAX_SCANS`, or one per strip or tile; no bound without JPEG compression."""
    tags = picture.tag_v2
    if tags.get(259) not in (6, 7):
        return 1 << 62
    parts = tags.get(324) or tags.get(273) or ()
    return max(MAX_SCANS, len(parts) if isinstance(parts, tuple) else 1)


def _count_tiff_values(data: bytes) -> int:
    """Count the numbers, such as offsets of strips, in the first directory of a TIFF; 0 for other files. Pillow creates
    a Python object for each, and more for a strip, before it gives the picture's size."""
    order, big = "<" if data[:2] == b"II" else ">", 43 in data[2:4]
    if data[:2] not in (b"II", b"MM") or not (big or 42 in data[2:4]):
        return 0
    offset, length, entry = (order + kinds for kinds in (("Q", "Q", "HHQ8x") if big else ("I", "H", "HHI4x")))
    try:
        (at,) = struct.unpack_from(offset, data, 8 if big else 4)
        (n,) = struct.unpack_from(length, data, at)
        entries = struct.iter_unpack(entry, data[at + struct.calcsize(length) :][: n * struct.calcsize(entry)])
        return sum(count for tag, kind, count in entries if kind not in _BYTE_TYPES or tag in _STRIP_TAGS)
    except (struct.error, OverflowError):
        return 0


def webp_size(data: bytes) -> tuple[int, int] | None:
    """Width and height of a WebP from its first chunk (RFC 9649); None for other files."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return None
    if data[12:16] == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if data[12:16] == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF


def _is_slow(data: bytes) -> bool:
    return data[:2] in (b"P1", b"P2", b"P3") or (data[:2] == b"BM" and data[30:34] in (b"\1\0\0\0", b"\2\0\0\0"))


def _jpeg_scale(width: int, height: int, target: int) -> int:
    """The largest of 8, 4, 2, 1 that leaves both sides at least twice `target`."""
    if target < 1:
        return 1
    return next(s for s in (8, 4, 2, 1) if s == 1 or min(width, height) >= 2 * s * target)


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert to mode RGB: blend transparency onto white, keep the upper 8 of 16 bits."""
    if image.mode.startswith("I"):  # 16 bits, which Pillow's conversion would clip at 255
        wide = np.asarray(image).astype(np.int64) >> 8
        image = Image.fromarray(np.clip(wide, 0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")
