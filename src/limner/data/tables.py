"""Rows of JSONL, CSV, Parquet and Arrow files that name or hold pictures.

Each kind of table has `columns`, a length and `row(index)`, which raises `Rejected` for what cannot be
read. Of text formats only the places of rows are kept in memory; a row is parsed when it is asked for.

    .jsonl, .ndjson   a row is a line that is not empty
    .csv, .tsv        a row is a record, and of a record that breaks off (a quote that is never closed, more
                      fields than columns in several lines) each line: the reader goes on behind its first line
    .parquet, .arrow  a row is a row; a row group whose number of rows cannot be true is one row
"""

from __future__ import annotations

import base64
import binascii
import csv
import io
import os
import warnings
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, Protocol

import numpy as np

from limner.data.foreign import (
    MAX_BYTES,
    MAX_COLUMNS,
    READ,
    counted,
    facts,
    fingerprint,
    open_regular,
    parse_json,
    read_file,
)
from limner.data.samples import Rejected, Sample, parse_captions
from limner.errors import UserError

MAX_ROW = 1 << 26  # bytes of a row of text
_MAX_GROUP = 1 << 31  # bytes of a row group, which is read as a whole
_KEPT_BYTES = 1 << 28  # of row groups that stay in memory
_MAX_LINES = 64  # of a record of CSV
CAPTION_COLUMNS = ("caption", "captions", "text", "prompt", "description", "alt", "title")
IMAGE_COLUMNS = (
    "image", "img", "picture", "image_bytes", "bytes", "image_path", "file_name", "filename",
    "image_file", "path", "file", "filepath", "file_path", "jpg", "jpeg", "png", "webp",
)  # fmt: skip
_BASE64_STARTS = ("data:image/", "/9j/", "iVBORw0KGgo", "UklGR", "R0lGOD")  # JPEG, PNG, WebP, GIF


class Table(Protocol):
    """Rows of one file."""

    columns: list[str]

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]: ...


class TableSource:
    """The rows of tables, one element each. Of several tables one that cannot be read is an element too."""

    def __init__(
        self,
        files: Sequence[Path],
        caption: str | None = None,
        image: str | None = None,
        allow_outside: bool = False,
        splits: Sequence[str | None] | None = None,
    ) -> None:
        """`splits` names the split of each file's rows, for those that name none themselves."""
        self.files, self.allow_outside = list(files), allow_outside
        self._splits = list(splits or [None] * len(files))
        self._tables = [_open_table(file, alone=len(files) == 1) for file in files]
        self._ends = np.cumsum([len(table) for table in self._tables])
        columns = list(dict.fromkeys(c for table in self._tables for c in table.columns))
        where = str(files[0])
        if len(columns) > MAX_COLUMNS:
            raise UserError(f"{where} has {len(columns):,} columns: at most {MAX_COLUMNS:,} are read")
        if len(self):
            self.caption = _find_column("caption", caption, CAPTION_COLUMNS, columns, where)
            self.image = _find_column("image", image, IMAGE_COLUMNS, columns, where)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def _row(self, index: int) -> tuple[int, dict[str, Any]]:
        table = int(np.searchsorted(self._ends, index, side="right"))
        offset = index - (int(self._ends[table - 1]) if table else 0)
        return table, self._tables[table].row(offset)

    @counted
    def __getitem__(self, index: int) -> Sample:
        table, row = self._row(index)
        captions = parse_captions(row.get(self.caption))
        meta = self._facts(table, row)
        return Sample(self._image(row.get(self.image), self.files[table].parent), captions, meta)

    @counted
    def meta(self, index: int) -> dict[str, Any]:
        return self._facts(*self._row(index))

    def _facts(self, table: int, row: dict[str, Any]) -> dict[str, Any]:
        meta = facts({k: v for k, v in row.items() if k != self.image})
        split = self._splits[table]
        return meta if split is None else {"split": split, **meta}

    def _image(self, value: Any, folder: Path) -> bytes:
        if isinstance(value, dict):  # the Image feature of Hugging Face's datasets
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes):
            if len(value) > MAX_BYTES:
                raise Rejected("file too large")
            return value
        if not isinstance(value, str) or not value.strip():
            raise Rejected("missing image")
        if value.startswith(_BASE64_STARTS) and len(value) > 64:
            try:
                return base64.b64decode(value.split(",")[-1], validate=True)
            except (binascii.Error, ValueError):
                pass  # it may yet be a path
        if "\0" in value or len(value) > 4096:
            raise Rejected("broken image")
        try:
            path = os.path.realpath(folder / value)
        except (OSError, ValueError):
            raise Rejected("missing image") from None
        if not self.allow_outside and not Path(path).is_relative_to(os.path.realpath(folder)):
            raise Rejected("path outside the data folder")
        return read_file(path, "missing image")

    def fingerprint(self) -> str:
        return fingerprint(self.files)


def _find_column(what: str, wanted: str | None, known: Sequence[str], columns: Sequence[str], where: str) -> str:
    listed = ", ".join(column[:40] for column in columns[:20]) or "none"
    if wanted is not None:
        if wanted not in columns:
            raise UserError(f'{where} has no column "{wanted}": its columns are {listed}')
        return wanted
    lowered = {column.lower(): column for column in reversed(columns)}
    for name in known:
        if name in lowered:
            return lowered[name]
    raise UserError(f"{where} has no {what} column that can be told by its name: name one of {listed}")


def _open_table(path: Path, alone: bool) -> Table:
    kind = {".parquet": _Parquet, ".arrow": _Arrow, ".csv": _Csv, ".tsv": _Csv}.get(path.suffix.lower(), _Jsonl)
    try:
        os.close(open_regular(path))
        return kind(path)
    except OSError as error:
        problem = UserError(f"{path} cannot be read: {error.strerror or error}")
    except UserError as error:
        problem = error
    if alone or "pip install" in str(problem):
        raise problem from None
    warnings.warn(f"{problem}; it is left out", stacklevel=2)
    return _Unreadable()


class _Unreadable:
    """A table of which not even the number of rows is known."""

    def __init__(self) -> None:
        self.columns: list[str] = []

    def __len__(self) -> int:
        return 1

    def row(self, index: int) -> dict[str, Any]:
        raise Rejected("damaged table")


class _Lines:
    """Spans of bytes in a text file, each of which is a row. A span that ends before it begins is a row that is
    broken, or too long if it is also empty."""

    def __init__(self, path: Path) -> None:
        self.path, self.columns = path, list[str]()
        self._spans = np.zeros((0, 2), np.int64)

    def __len__(self) -> int:
        return len(self._spans)

    def _text(self, index: int) -> str:
        """A row's text; bytes that are not UTF-8 become surrogates, which `parse_captions` reports."""
        start, stop = self._spans[index].tolist()
        if stop < start:
            raise Rejected("broken row")
        if stop - start > MAX_ROW:
            raise Rejected("row too long")
        descriptor = os.open(self.path, READ)
        try:
            return os.pread(descriptor, stop - start, start).decode("utf-8-sig", "surrogateescape")
        finally:
            os.close(descriptor)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines by "\\n", in pieces of at most `MAX_ROW` bytes."""
    return iter(lambda: file.readline(MAX_ROW), b"")


class _Jsonl(_Lines):
    """A JSON object a line."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        spans, start, at = array("q"), 0, 0
        with open(path, "rb") as file:
            for piece in _lines(file):
                at += len(piece)
                if piece.endswith(b"\n") or len(piece) < MAX_ROW:
                    if at - start > MAX_ROW or piece.strip():
                        spans.extend((start, at))
                    start = at
        if at > start:
            spans.extend((start, at))
        self._spans = np.array(spans, np.int64).reshape(-1, 2)
        for index in range(min(len(self), 100)):
            try:
                self.columns += [name for name in self.row(index) if name not in self.columns]
            except Rejected:
                continue

    def row(self, index: int) -> dict[str, Any]:
        try:
            row = parse_json(self._text(index))
        except ValueError:
            raise Rejected("broken row") from None
        if not isinstance(row, dict) or len(row) > MAX_COLUMNS:
            raise Rejected("broken row")
        return row


class _Csv(_Lines):
    """Comma- or tab-separated values with a header."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        csv.field_size_limit(MAX_ROW)
        self._delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
        spans = array("q")
        with open(path, "rb") as file:
            for start, stop, fields in self._records(file):
                if not self.columns:
                    if fields is None:
                        raise UserError(
                            f"{path} has a header that cannot be read: give it a first line of column names"
                        )
                    self.columns = fields
                else:
                    spans.extend((start, stop) if fields is not None or stop - start > MAX_ROW else (stop, start))
        self._spans = np.array(spans, np.int64).reshape(-1, 2)

    def _records(self, file: BinaryIO) -> Iterator[tuple[int, int, list[str] | None]]:
        """Where each record lies, without empty ones, and its fields (None if it is broken)."""
        at, size = 0, os.fstat(file.fileno()).st_size
        while at < size:
            lines = _Pulled(file, at)
            reader = csv.reader(lines, delimiter=self._delimiter, strict=True)
            whole = True
            while whole and at < size:
                lines.ends.clear()
                try:
                    fields = next(reader)
                except (csv.Error, ValueError):
                    fields = None
                if not lines.ends:
                    return
                whole = fields is not None and (len(lines.ends) == 1 or len(fields) == len(self.columns or fields))
                stop = lines.ends[-1 if whole else 0]
                if not whole:  # unless it is but quotes within a field
                    fields = self._lenient(lines.text) if lines.text is not None and len(lines.ends) == 1 else None
                if fields is None or (self.columns and any(fields[len(self.columns) :])):
                    yield at, stop, None
                elif fields:
                    yield at, stop, fields
                at = stop

    def _lenient(self, text: str) -> list[str] | None:
        try:
            return next(csv.reader(io.StringIO(text, newline=""), delimiter=self._delimiter), None)
        except csv.Error:
            return None

    def row(self, index: int) -> dict[str, Any]:
        fields = self._lenient(self._text(index).replace("\0", ""))
        if fields is None:
            raise Rejected("broken row")
        return dict(zip(self.columns, fields, strict=False))


class _Pulled:
    """Lines of a file from a place on, as text; `ends` says where those that a record has taken end.

    Raises `ValueError` if a record takes too many, or one that is too long.
    """

    def __init__(self, file: BinaryIO, at: int) -> None:
        file.seek(at)
        self.file, self.at, self.ends = file, at, list[int]()
        self.text: str | None = None  # the last line, if it can be the last of a record

    def __iter__(self) -> _Pulled:
        return self

    def __next__(self) -> str:
        line, self.text = self.file.readline(MAX_ROW + 1), None
        if not line:
            raise StopIteration
        encoding = "utf-8-sig" if self.at == 0 else "utf-8"
        long = len(line) > MAX_ROW
        self.at += len(line)
        while long and not line.endswith(b"\n") and (line := self.file.readline(MAX_ROW)):
            self.at += len(line)
        self.ends.append(self.at)
        if long or len(self.ends) > _MAX_LINES:
            raise ValueError("too long")
        self.text = line.decode(encoding, "surrogateescape").replace("\0", "")
        return self.text


class _Groups:
    """Tables of Arrow, loaded when asked for, of which the last few are kept. Reading at random from a file whose
    row groups hold many pictures is slow: `limner data prepare` turns it into shards."""

    def __init__(self, columns: Sequence[str], counts: Sequence[int]) -> None:
        self.columns = list(columns)
        self._counts, self._ends = list(counts), np.cumsum(counts, dtype=np.int64)
        self._groups: OrderedDict[int, Any] = OrderedDict()  # None for what is damaged
        self._lock = Lock()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def _load(self, group: int) -> Any:
        """A table of Arrow. Raises what pyarrow raises if it is damaged."""
        raise NotImplementedError

    def row(self, index: int) -> dict[str, Any]:
        group = int(np.searchsorted(self._ends, index, side="right"))
        with self._lock:
            if group not in self._groups:
                try:
                    table = self._load(group)
                except Exception:  # pyarrow raises OSError, ArrowException, UnicodeDecodeError, MemoryError ...
                    table = None
                self._groups[group] = table if table is not None and table.num_rows == self._counts[group] else None
                sizes = [getattr(table, "nbytes", 0) for table in self._groups.values()]
                while len(sizes) > 1 and sum(sizes) > _KEPT_BYTES:
                    self._groups.popitem(last=False)
                    sizes.pop(0)
            self._groups.move_to_end(group)
            table = self._groups[group]
        if table is None:
            raise Rejected("damaged table")
        return _arrow_row(table, index - int(self._ends[group] - self._counts[group]))


class _Parquet(_Groups):
    def __init__(self, path: Path) -> None:
        pyarrow = _pyarrow(path)
        import pyarrow.parquet as parquet

        size = path.stat().st_size
        try:
            self._file = parquet.ParquetFile(path)
            meta = self._file.metadata
            rows = [meta.row_group(group).num_rows for group in range(meta.num_row_groups)]
            names = self._file.schema_arrow.names
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise UserError(f"{path} is not a Parquet file: {_first_line(error)}") from None
        # Each row holds a caption or a picture, so more rows than bytes are a damaged number.
        super().__init__(names, [count if 0 <= count <= size else 1 for count in rows])

    def _load(self, group: int) -> Any:
        if self._file.metadata.row_group(group).total_byte_size > _MAX_GROUP:
            raise Rejected("damaged table")
        return self._file.read_row_group(group)


class _Arrow(_Groups):
    """A file of Arrow's IPC formats: the stream that `datasets` writes, or the one with a footer. Its batches stay
    in the file, which is mapped into memory."""

    def __init__(self, path: Path) -> None:
        pyarrow = _pyarrow(path)
        import pyarrow.ipc as ipc

        self._batches: list[Any] = []
        whole, names = True, []
        try:
            with open(path, "rb") as start:
                footed = start.read(6) == b"ARROW1"
            mapped = pyarrow.memory_map(str(path))
            file = ipc.open_file(mapped) if footed else ipc.open_stream(mapped)
            batches = (file.get_batch(n) for n in range(file.num_record_batches)) if footed else file
            names = file.schema.names
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise UserError(f"{path} is not an Arrow file: {_first_line(error)}") from None
        try:
            self._batches += batches
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            warnings.warn(f"{path} is damaged ({_first_line(error)}): what follows is left out", stacklevel=2)
            whole = False
        size = path.stat().st_size
        counts = [len(batch) if len(batch) <= size else 1 for batch in self._batches]
        super().__init__(names, counts + [1] * (not whole))

    def _load(self, group: int) -> Any:
        import pyarrow

        columns = []
        for column in self._batches[group].columns:
            text = pyarrow.types.is_string(column.type)
            # Offsets beyond the data would be read as they are; text is checked cell by cell.
            (column.view(pyarrow.binary()) if text else column).validate(full=True)
            columns.append(column)
        return pyarrow.Table.from_arrays(columns, names=self.columns)


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise UserError(f'reading {path} needs pyarrow: pip install "limner[data]"') from None
    return pyarrow


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _arrow_row(table: Any, offset: int) -> dict[str, Any]:
    row = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        try:
            row[name] = column[offset].as_py()
        except UnicodeDecodeError:
            row[name] = "\udc80"  # reported as "caption is not UTF-8" if it is one
        except (ValueError, OverflowError):  # times that Python cannot hold
            row[name] = column[offset].cast("string").as_py()
    return row
