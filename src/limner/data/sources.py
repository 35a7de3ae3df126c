"""Open image-caption data as it lies on disk, and decode its pictures.

`open_source` takes a folder or a glob and finds out what it is:

    pictures with captions   a/b.jpg + a/b.txt, in folders of any depth
    tables                   .jsonl, .csv, .parquet: a caption column and a column of image paths
                             (relative to the file) or bytes (raw, base64, or a {"bytes", "path"} struct)
    shards                   00000.tar ... of img2dataset or WebDataset (see `shards.py`)

Data from elsewhere is not trusted. A table may not name files outside its own folder (unless
`allow_outside`), a picture's size is read from its header before any memory is spent on pixels, and
only plain raster formats are decoded (Pillow's EPS reader, for one, would start Ghostscript).
"""

from __future__ import annotations

import base64
import binascii
import csv
import glob as globbing
import io
import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock, local
from typing import Any, cast

import numpy as np
from PIL import Image, ImageOps

from limner.data.samples import (
    Rejected,
    Sample,
    Selection,
    Source,
    digest,
    parse_captions,
    select_split,
)
from limner.data.shards import IMAGE_SUFFIXES, ShardReader
from limner.errors import UserError

simplejpeg: Any
try:
    import simplejpeg
except ImportError:  # an extra; Pillow decodes the same values, more slowly
    simplejpeg = None

__all__ = [
    "Rejected",
    "Sample",
    "Selection",
    "Source",
    "decode_image",
    "open_source",
    "select_split",
]

MAX_PIXELS = 1 << 26  # 8192 x 8192; a picture that claims more is taken for a decompression bomb
MAX_BYTES = 1 << 28  # of an encoded picture
TABLES = ("jsonl", "ndjson", "csv", "tsv", "parquet")
CAPTION_COLUMNS = ("caption", "captions", "text", "prompt", "description", "alt", "title")
IMAGE_COLUMNS = (
    "image", "img", "picture", "image_bytes", "bytes", "image_path", "file_name", "filename",
    "image_file", "path", "file", "filepath", "file_path", "jpg", "jpeg", "png", "webp",
)  # fmt: skip
_local = local()
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_BASE64_STARTS = ("data:image/", "/9j/", "iVBORw0KGgo", "UklGR", "R0lGOD")  # JPEG, PNG, WebP, GIF


# --------------------------------------------------------------------------------------- pictures


def decode_image(data: bytes, *, max_pixels: int = MAX_PIXELS, target: int = 0, reuse: bool = False) -> np.ndarray:
    """Decode a picture to uint8 [H, W, 3]: sRGB values, upright, on white where it is transparent.

    `target` says that the caller will next resize the shorter side to at most that many pixels, by
    area. It allows two economies on JPEGs: to decode at 1/2, 1/4 or 1/8 (in the DCT domain) what
    stays at least twice as large, and to repeat instead of interpolate the chroma samples of what is
    1.5 times as large (averaged, these are the area-resized chroma plane as it is stored).
    With `reuse` the result may lie in memory that this thread's next call overwrites.
    Raises `Rejected`: "broken image", or "decompression bomb" if its header claims more than
    `max_pixels`.
    """
    if simplejpeg is not None and data[:2] == b"\xff\xd8" and b"Exif\0" not in data[:65536]:
        try:
            height, width, space, _ = simplejpeg.decode_jpeg_header(data)
            _check_pixels(width, height, max_pixels)
            if space in ("YCbCr", "Gray", "RGB"):
                return _decode_jpeg(data, height, width, target, reuse)
        except ValueError:
            pass  # odd or damaged: let Pillow decide
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
        _check_pixels(*image.size, max_pixels)
        scale = _jpeg_scale(*image.size, target)
        if image.format == "JPEG" and scale > 1:
            image.draft(None, (image.width // scale, image.height // scale))
        return np.asarray(_to_rgb(ImageOps.exif_transpose(image)))
    except Rejected:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise Rejected("decompression bomb") from None
    except Exception:  # the decoders raise whatever they meet: OSError, SyntaxError, struct.error ...
        raise Rejected("broken image") from None


def _decode_jpeg(data: bytes, height: int, width: int, target: int, reuse: bool) -> np.ndarray:
    scale = _jpeg_scale(width, height, target)
    height, width = -(-height // scale), -(-width // scale)
    buffer = None
    if reuse:  # fresh pages for each picture would cost a tenth of the decoding
        size = height * width * 3
        if len(getattr(_local, "pixels", ())) < size:
            _local.pixels = np.empty(size, np.uint8)
        buffer = _local.pixels[:size]
    return simplejpeg.decode_jpeg(
        data,
        fastupsample=bool(target) and min(height, width) >= 1.5 * target,
        min_height=height,
        min_width=width,
        min_factor=scale,
        buffer=buffer,
    )


def _check_pixels(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise Rejected("decompression bomb")
    if width < 1 or height < 1:
        raise Rejected("broken image")


def _jpeg_scale(width: int, height: int, target: int) -> int:
    """The largest of 8, 4, 2, 1 by which both sides can shrink and still be twice `target`."""
    if target < 1:
        return 1
    return next(s for s in (8, 4, 2, 1) if s == 1 or min(width, height) >= 2 * s * target)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits; Pillow's own conversion would clip at 255
        wide = np.asarray(image).astype(np.int64) >> 8
        image = Image.fromarray(np.clip(wide, 0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


# ---------------------------------------------------------------------------------------- sources


def open_source(
    path: str | os.PathLike[str],
    *,
    caption: str | None = None,
    image: str | None = None,
    split: str | None = None,
    allow_outside: bool = False,
) -> Source:
    """Open a folder, a file or a glob of pictures with captions.

    Args:
        caption, image: the columns of a table, where their names do not tell.
        split: keep the samples whose metadata names this split ("train", "held-out").
        allow_outside: let a table name files outside its folder.

    Raises `UserError` if there is nothing to read or the columns cannot be told.
    """
    source = _open(os.fspath(path), caption, image, allow_outside)
    if len(source) == 0:
        raise UserError(f"{path} has no pictures: give a folder of pictures, a table or tar shards")
    if split is None:
        return source
    chosen = select_split(source, split)
    if len(chosen) == 0:
        other = "train" if split == "held-out" else "held-out"
        raise UserError(f'{path} has no samples of the split "{split}": take "{other}", or `limner data prepare` it')
    return chosen


def _open(path: str, caption: str | None, image: str | None, allow_outside: bool) -> Source:
    if os.path.isdir(path):
        return _open_folder(Path(path), caption, image, allow_outside)
    names = [path] if os.path.isfile(path) else sorted(globbing.glob(path, recursive=True))
    files = [Path(name) for name in names if os.path.isfile(name)]
    if not files:
        raise UserError(f"{path} does not exist: give a folder, a file or a glob")
    kinds = {file.suffix[1:].lower() for file in files}
    if kinds == {"tar"}:
        return ShardReader(files)
    if kinds <= set(TABLES):
        return TableSource(files, caption, image, allow_outside)
    if kinds <= {*IMAGE_SUFFIXES, "txt"}:
        return FolderSource(files)
    raise UserError(
        f"{path} is a mixture or of an unknown kind ({', '.join(sorted(kinds))}): "
        f"give pictures, tar shards or one of {', '.join(TABLES)}"
    )


def _open_folder(folder: Path, caption: str | None, image: str | None, outside: bool) -> Source:
    top = sorted(entry for entry in folder.iterdir() if entry.is_file())
    if (tars := [entry for entry in top if entry.suffix == ".tar"]) or (folder / "INCOMPLETE").exists():
        return ShardReader(tars or [folder / "00000.tar"])
    files = [
        Path(base, name)
        for base, folders, names in os.walk(folder)
        if folders.sort() is None
        for name in sorted(names)
        if not name.startswith(".")
    ]
    pictures = FolderSource(files)
    tables = [entry for entry in top if entry.suffix[1:].lower() in TABLES]
    # HF's "imagefolder" keeps its captions in metadata.jsonl (or .csv, .parquet) beside the pictures.
    return TableSource(tables, caption, image, outside) if tables and not pictures.captioned else pictures


class FolderSource:
    """Pictures and the `.txt` files of the same name beside them."""

    def __init__(self, files: Sequence[Path]) -> None:
        stems: dict[Path, list[Path | None]] = {}
        for file in files:
            kind = file.suffix[1:].lower()
            if kind == "txt" or kind in IMAGE_SUFFIXES:
                stems.setdefault(file.with_suffix(""), [None, None])[kind == "txt"] = file
        self._pairs = [(image, text) for image, text in stems.values()]
        #: whether any picture has a caption
        self.captioned = any(image and text for image, text in self._pairs)
        if not any(image for image, _ in self._pairs):
            self._pairs = []

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> Sample:
        image, text = self._pairs[index]
        if image is None:
            raise Rejected("missing image")
        captions = parse_captions(_read(text, "missing caption") if text else None)
        return Sample(_read(image, "missing image"), captions, {"path": str(image)})

    def meta(self, index: int) -> dict[str, Any]:
        return {"path": str(self._pairs[index][0])}

    def fingerprint(self) -> str:
        return _fingerprint([path for pair in self._pairs for path in pair if path])


def _read(path: Path, otherwise: str) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError:
        raise Rejected(otherwise) from None
    if len(data) > MAX_BYTES:
        raise Rejected("decompression bomb")
    return data


def _fingerprint(paths: Sequence[Path]) -> str:
    stats = [(path.name, path.stat()) for path in paths]
    return digest(*(f"{name} {s.st_size} {s.st_mtime_ns}" for name, s in stats))


# ----------------------------------------------------------------------------------------- tables


class TableSource:
    """The rows of JSONL, CSV or Parquet files."""

    def __init__(
        self,
        files: Sequence[Path],
        caption: str | None = None,
        image: str | None = None,
        allow_outside: bool = False,
    ) -> None:
        self.files, self.allow_outside = list(files), allow_outside
        self._tables = [_open_table(file) for file in files]
        self._ends = np.cumsum([len(table) for table in self._tables])
        columns = list(dict.fromkeys(c for table in self._tables for c in table.columns))
        where = str(files[0])
        if len(self):
            self.caption = _find_column("caption", caption, CAPTION_COLUMNS, columns, where)
            self.image = _find_column("image", image, IMAGE_COLUMNS, columns, where)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def _row(self, index: int) -> tuple[Path, dict[str, Any]]:
        table = int(np.searchsorted(self._ends, index, side="right"))
        offset = index - (int(self._ends[table - 1]) if table else 0)
        return self.files[table], self._tables[table].row(offset)

    def __getitem__(self, index: int) -> Sample:
        file, row = self._row(index)
        captions = parse_captions(_as_captions(row.get(self.caption)))
        return Sample(self._image(row.get(self.image), file.parent), captions, self._facts(row))

    def meta(self, index: int) -> dict[str, Any]:
        return self._facts(self._row(index)[1])

    def _facts(self, row: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in row.items() if k != self.image and not isinstance(v, bytes)}

    def _image(self, value: Any, folder: Path) -> bytes:
        if isinstance(value, dict):  # the Image feature of Hugging Face's datasets
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes):
            return value
        if not isinstance(value, str) or not value.strip():
            raise Rejected("missing image")
        if value.startswith(_BASE64_STARTS) and len(value) > 64:
            try:
                return base64.b64decode(value.split(",")[-1], validate=True)
            except binascii.Error:
                pass  # it may yet be a path
        if "\0" in value or len(value) > 4096:
            raise Rejected("broken image")
        path = (folder / value).resolve()
        if not self.allow_outside and not path.is_relative_to(folder.resolve()):
            raise Rejected("path outside the data folder")
        return _read(path, "missing image")

    def fingerprint(self) -> str:
        return _fingerprint(self.files)


def _as_captions(value: Any) -> str | list[str] | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return [text for text in value if isinstance(text, str)]
    return None


def _find_column(what: str, wanted: str | None, known: Sequence[str], columns: Sequence[str], where: str) -> str:
    listed = ", ".join(columns) or "none"
    if wanted is not None:
        if wanted not in columns:
            raise UserError(f'{where} has no column "{wanted}": its columns are {listed}')
        return wanted
    lowered = {column.lower(): column for column in reversed(columns)}
    for name in known:
        if name in lowered:
            return lowered[name]
    raise UserError(f"{where} has no {what} column that can be told by its name: name one of {listed}")


class _Jsonl:
    """A JSON object a line, parsed when it is asked for; only the offsets of lines are kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb") as file:
            lengths = np.array([len(line) for line in file], np.int64)
        ends = np.cumsum(lengths)
        self._spans = np.stack([ends - lengths, ends], 1)[lengths > 1]  # [N, 2], without empty lines
        self.columns: list[str] = []
        for index in range(min(len(self), 100)):
            try:
                self.columns += [name for name in self.row(index) if name not in self.columns]
            except Rejected:
                continue

    def __len__(self) -> int:
        return len(self._spans)

    def row(self, index: int) -> dict[str, Any]:
        start, stop = self._spans[index].tolist()
        with open(self.path, "rb") as file:
            line = os.pread(file.fileno(), stop - start, start)
        try:
            # Bytes that are not UTF-8 become surrogates, which `parse_captions` reports.
            row = json.loads(line.decode("utf-8-sig", "surrogateescape"))
        except ValueError:
            raise Rejected("broken row") from None
        if not isinstance(row, dict):
            raise Rejected("broken row")
        return row


class _Csv:
    """Comma- or tab-separated values with a header, held in memory."""

    def __init__(self, path: Path) -> None:
        csv.field_size_limit(MAX_BYTES)
        delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
        with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            reader = csv.reader((line.replace("\0", "") for line in file), delimiter=delimiter)
            try:
                self.columns = next(reader, [])
                self._rows = [row for row in reader if row]
            except csv.Error as error:
                raise UserError(f"{path}, line {reader.line_num}, cannot be read: {error}") from None

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        return dict(zip(self.columns, self._rows[index], strict=False))


class _Parquet:
    """Row groups are read when asked for and the last few kept. Reading at random from a file whose
    row groups hold many pictures is slow: `limner data prepare` turns it into shards."""

    _KEPT = 4

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow
            import pyarrow.parquet as parquet
        except ImportError:
            raise UserError(f'reading {path} needs pyarrow: pip install "limner[data]"') from None
        try:
            self._file = parquet.ParquetFile(path)
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{path} is not a Parquet file: {error}") from None
        meta = self._file.metadata
        self.columns = list(self._file.schema_arrow.names)
        self._ends = np.cumsum([meta.row_group(g).num_rows for g in range(meta.num_row_groups)])
        self._groups: OrderedDict[int, Any] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def row(self, index: int) -> dict[str, Any]:
        group = int(np.searchsorted(self._ends, index, side="right"))
        offset = index - (int(self._ends[group - 1]) if group else 0)
        with self._lock:
            if group not in self._groups:
                self._groups[group] = self._file.read_row_group(group)
                if len(self._groups) > self._KEPT:
                    self._groups.popitem(last=False)
            self._groups.move_to_end(group)
            table = self._groups[group]
        return cast(dict[str, Any], _arrow_row(table, offset))


def _arrow_row(table: Any, offset: int) -> dict[str, Any]:
    row = {}
    for name in table.column_names:
        try:
            row[name] = table.column(name)[offset].as_py()
        except UnicodeDecodeError:
            row[name] = "\udc80"  # reported as "caption is not UTF-8" if it is one
    return row


def _open_table(path: Path) -> _Jsonl | _Csv | _Parquet:
    return {".parquet": _Parquet, ".csv": _Csv, ".tsv": _Csv}.get(path.suffix.lower(), _Jsonl)(path)
