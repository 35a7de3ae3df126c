"""Decode untrusted pictures in bounded time and memory.

Only plain raster formats are decoded (Pillow's EPS reader would start Ghostscript). A thread waits until the memory of
decoding, computed from the header, fits into `BUDGET` together with the pictures of other threads.
"""

from __future__ import annotations

import io
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import numpy as np
from PIL import Image, features
from PIL.Image import Transpose

from limner.data.sample import Rejected, is_environment_error
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
#: The transpose that turns a picture of each EXIF orientation upright.
_ORIENTATIONS = {
    2: Transpose.FLIP_LEFT_RIGHT, 3: Transpose.ROTATE_180, 4: Transpose.FLIP_TOP_BOTTOM, 5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270, 7: Transpose.TRANSVERSE, 8: Transpose.ROTATE_90,
}  # fmt: skip
_local = threading.local()


class Budget:
    """A memory budget, in bytes, that threads share. A thread gets more than the total if no other holds bytes."""

    def __init__(self, total: int) -> None:
        self.total, self.used = total, 0
        self._queue, self._released = threading.Lock(), threading.Condition()

    @contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """Hold `size` bytes for the block."""
        with self._queue, self._released:
            self._released.wait_for(lambda: not self.used or self.used + size <= self.total)
            self.used += size
        try:
            yield
        finally:
            with self._released:
                self.used -= size
                self._released.notify()


BUDGET = Budget(1 << 30)


def decode_image(data: bytes, *, target: int = 0) -> np.ndarray:
    """Decode a picture to uint8 [H, W, 3]: sRGB values, upright, blended onto white.

    `target` is explained at `decoded`. Raises `Rejected`: "broken image", "decompression bomb" if the header claims
    more than `MAX_PIXELS`, "too many scans", "too many strips", "file too large" for slow formats, or "floating-point
    pixels", since their value of white is unknown.
    """
    with decoded(data, target=target) as image:
        return image


@contextmanager
def decoded(data: bytes, *, target: int = 0, reuse: bool = False) -> Iterator[np.ndarray]:
    """`decode_image` as a context manager: the picture holds its share of `BUDGET` until the block ends.

    With `target` > 0 the caller promises to resize the picture by area to a shorter side of at most `target` pixels.
    JPEGs then decode faster: at 1/2, 1/4 or 1/8 of their size, if the shorter side remains at least twice the target;
    and with repeated instead of interpolated chroma, if the shorter side remains at least 1.5 times the target, since
    resizing averages chroma again. With `reuse`, this thread's next call may overwrite the result.
    """
    for needed, decode in _decoders(data, target, reuse):
        with BUDGET.reserve(needed):
            image = decode()
            if image is not None:
                yield image
                return


def _decoders(data: bytes, target: int, reuse: bool) -> Iterator[tuple[int, Callable[[], np.ndarray | None]]]:
    """Yield the bytes of memory and the function of each decoder to try, until one does not return None. Raises
    `Rejected` if the header shows that decoding would take too long or too much memory."""
    is_multiscan = data[:2] == b"\xff\xd8" and _has_several_scans(data)
    scans = data.count(b"\xff\xda") if is_multiscan else 0  # compressed data escapes 0xff with a zero
    if (size := _jpeg_size(data)) is not None:
        pixels = _check_size(*size, scans)
        needed = 3 * pixels // _jpeg_scale(*size, target) ** 2 + is_multiscan * _BYTES_PER_PIXEL["JPEG"] * pixels
        yield needed, partial(_decode_jpeg, data, *size, target, reuse)
    if (size := webp_size(data)) is not None:  # Pillow allocates memory for a whole WebP on opening
        needed = _check_size(*size) * (_BYTES_PER_PIXEL["WEBP"] + 7)
        yield needed, lambda: _decode_with_pillow(_open(data))
    if _count_tiff_values(data) > _MAX_TIFF_VALUES:
        raise Rejected("too many strips")
    picture = _open(data)
    pixels = _check_size(*picture.size, scans)  # also for MPO: several JPEGs in one file
    is_slow = data[:2] in (b"P1", b"P2", b"P3") or (data[:2] == b"BM" and data[30:34] in (b"\1\0\0\0", b"\2\0\0\0"))
    if is_slow and len(data) > _MAX_SLOW_BYTES:
        raise Rejected("file too large")
    if picture.mode == "F":
        raise Rejected("floating-point pixels")
    if picture.format == "TIFF" and _jpegs_in_tiff(picture) < data.count(b"\xff\xda"):
        raise Rejected("too many scans")
    if picture.format == "JPEG" and (scale := _jpeg_scale(*picture.size, target)) > 1:
        picture.draft(None, (picture.width // scale, picture.height // scale))
    yield pixels * (_BYTES_PER_PIXEL.get(picture.format or "", 8) + 7), partial(_decode_with_pillow, picture)


def _open(data: bytes) -> Image.Image:
    try:
        picture = Image.open(io.BytesIO(data), formats=_FORMATS)
    except Exception as error:  # Pillow's readers raise OSError, SyntaxError, struct.error ...
        raise _as_rejection(error) from None
    _check_size(*picture.size)
    return picture


def _decode_with_pillow(picture: Image.Image) -> np.ndarray:
    try:
        picture.load()
        if (orientation := picture.getexif().get(0x0112)) in _ORIENTATIONS:
            upright = picture.transpose(_ORIENTATIONS[orientation])
            picture.close()
            picture = upright
        image = np.empty((picture.height, picture.width, 3), np.uint8)
        rows = max(1, PIXELS_PER_STRIP // picture.width)  # of a strip: Pillow's conversions copy their whole input
        for top in range(0, picture.height, rows):
            bottom = min(top + rows, picture.height)
            image[top:bottom] = np.asarray(to_rgb(picture.crop((0, top, picture.width, bottom))))
        picture.close()
        return image
    except Exception as error:
        raise _as_rejection(error) from None


def _as_rejection(error: Exception) -> Exception:
    """Return the exception for a failure of Pillow. Raises `UserError` if Pillow lacks a format."""
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return Rejected("decompression bomb")
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


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Width and height of a JPEG; None if simplejpeg cannot decode it, or if it may have an orientation."""
    if data[:2] != b"\xff\xd8" or simplejpeg is None or any(mark in data[:65536] for mark in _ORIENTATION_MARKS):
        return None
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    return (width, height) if space in ("YCbCr", "Gray", "RGB") else None


def _decode_jpeg(data: bytes, width: int, height: int, target: int, reuse: bool) -> np.ndarray | None:
    """Decode with simplejpeg; return None on failure, for Pillow to try."""
    scale = _jpeg_scale(width, height, target)
    height, width = -(-height // scale), -(-width // scale)
    buffer, size = None, height * width * 3
    if reuse and size <= _MAX_REUSED_BYTES:  # new memory pages for each picture would take 10% of the decoding time
        if len(getattr(_local, "pixels", ())) < size:
            _local.pixels = np.empty(size, np.uint8)
        buffer = _local.pixels[:size]
    fast = 0 < 1.5 * target <= min(height, width)
    try:
        return simplejpeg.decode_jpeg(
            data, fastupsample=fast, min_height=height, min_width=width, min_factor=scale, buffer=buffer
        )
    except Exception:  # ValueError, or a MemoryError
        return None


def _check_size(width: int, height: int, scans: int = 0) -> int:
    """Return the number of pixels. Raises `Rejected` if it, or the number of scans, is too large."""
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise Rejected("decompression bomb")
    if width < 1 or height < 1:
        raise Rejected("broken image")
    if scans > MAX_SCANS or scans * width * height > MAX_SCANNED:
        raise Rejected("too many scans")
    return width * height


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


def _jpeg_scale(width: int, height: int, target: int) -> int:
    """The largest of 8, 4, 2, 1 that leaves both sides at least twice `target`; 1 without a target."""
    return next((s for s in (8, 4, 2) if 0 < 2 * s * target <= min(width, height)), 1)


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert to mode RGB: blend transparency onto white, keep the upper 8 of 16 bits."""
    if image.mode.startswith("I"):  # 16 bits, which Pillow's conversion would clip at 255
        wide = np.asarray(image).astype(np.int64) >> 8
        image = Image.fromarray(np.clip(wide, 0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB")
