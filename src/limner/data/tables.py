"""Samples from the rows of tables, which name or hold pictures.

JSONL and CSV are in `text_tables.py`, Parquet and Arrow in `arrow_tables.py`. Each kind of table has `columns`, a
length and `row(index)`, which raises `Rejected` for an unreadable row.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

from limner.data.arrow_tables import Arrow, Parquet
from limner.data.sample import Rejected, Sample, Source, fingerprint, parse_captions
from limner.data.sanitize import MAX_BYTES, MAX_COLUMNS, open_regular, read_file, sanitize_metadata
from limner.data.text_tables import Csv, Jsonl
from limner.errors import UserError

CAPTION_COLUMNS = ("caption", "captions", "text", "prompt", "description", "alt", "title")
IMAGE_COLUMNS = (
    "image", "img", "picture", "image_bytes", "bytes", "image_path", "file_name", "filename",
    "image_file", "path", "file", "filepath", "file_path", "jpg", "jpeg", "png", "webp",
)  # fmt: skip
_BASE64_STARTS = ("data:image/", "/9j/", "iVBORw0KGgo", "UklGR", "R0lGOD")  # JPEG, PNG, WebP, GIF


class TableSource(Source):
    """A source of the rows of tables. Among several tables, an unreadable one counts as one element.

    Raises `UserError` if a single table is unreadable, if pyarrow is missing, or if a column is not found.
    """

    def __init__(
        self,
        files: Sequence[Path],
        caption: str | None,
        image: str | None,
        allow_outside: bool,
        splits: Sequence[str | None],
    ) -> None:
        """`splits` holds, for each file, the split of its rows that name none."""
        self.files, self.allow_outside, self._splits = list(files), allow_outside, list(splits)
        self.tables = [_open_table(file, alone=len(files) == 1) for file in files]
        self._starts = [0, *accumulate(map(len, self.tables))]
        columns = list(dict.fromkeys(c for table in self.tables for c in table.columns))
        if len(columns) > MAX_COLUMNS:
            raise UserError(f"{files[0]} has {len(columns):,} columns: a table may have at most {MAX_COLUMNS:,}")
        if len(self):
            self.caption = _find_column("caption", caption, CAPTION_COLUMNS, columns, files[0])
            self.image = _find_column("image", image, IMAGE_COLUMNS, columns, files[0])

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, index: int) -> tuple[int, dict[str, Any]]:
        """Return the number of a row's table, and the row."""
        table = bisect_right(self._starts, index) - 1
        return table, self.tables[table].row(index - self._starts[table])

    def read(self, index: int, picture: bool) -> Sample:
        table, row = self.row(index)
        captions = parse_captions(row.get(self.caption))
        meta = self._sanitize(table, row)
        image = self._image(table, row)
        if isinstance(image, Path):
            image = read_file(image, "missing image") if picture else b""
        return Sample(image, captions, meta)

    def read_meta(self, index: int) -> dict[str, Any]:
        return self._sanitize(*self.row(index))

    def _sanitize(self, table: int, row: dict[str, Any]) -> dict[str, Any]:
        return sanitize_metadata({k: v for k, v in row.items() if k != self.image}, self._splits[table])

    def _image(self, table: int, row: dict[str, Any]) -> bytes | Path:
        """Return a row's picture, or the path of its file."""
        value, folder = row.get(self.image), self.files[table].parent
        if isinstance(value, dict):  # the Image feature of Hugging Face's datasets
            value = value.get("bytes") or value.get("path")
        if isinstance(value, str) and value.startswith(_BASE64_STARTS) and len(value) > 64:
            with contextlib.suppress(binascii.Error, ValueError):  # not base64: a path
                value = base64.b64decode(value.split(",")[-1], validate=True)
        if isinstance(value, bytes):
            if len(value) > MAX_BYTES:
                raise Rejected("file too large")
            return value
        if not isinstance(value, str) or not value.strip():
            raise Rejected("missing image")
        if "\0" in value or len(value) > 4096:
            raise Rejected("broken image")
        try:
            path = Path(os.path.realpath(folder / value))
        except (OSError, ValueError):
            raise Rejected("missing image") from None
        if not self.allow_outside and not path.is_relative_to(os.path.realpath(folder)):
            raise Rejected("path outside the data folder")
        return path

    def fingerprint(self) -> str:
        return fingerprint(chain(self.files, self._picture_files()))

    def _picture_files(self) -> Iterator[Path]:
        """Yield the picture files that rows name. Stops reading a table at the first picture that it holds."""
        for first, end in pairwise(self._starts):
            for index in range(first, end):
                try:
                    image = self._guarded(lambda index: self._image(*self.row(index)), index)
                except Rejected:
                    continue
                if isinstance(image, bytes):
                    break
                yield image


def _find_column(role: str, wanted: str | None, known: Sequence[str], columns: Sequence[str], file: Path) -> str:
    listed = ", ".join(column[:40] for column in columns[:20]) or "none"
    if wanted is not None:
        if wanted in columns:
            return wanted
        raise UserError(f'{file} lacks the column "{wanted}": choose one of {listed}')
    by_lowercase = {column.lower(): column for column in reversed(columns)}
    for name in known:
        if name in by_lowercase:
            return by_lowercase[name]
    raise UserError(f"{file} lacks a {role} column with a known name: name one of {listed}")


def _open_table(path: Path, alone: bool) -> Parquet | Arrow | Csv | Jsonl | _Unreadable:
    kind = {".parquet": Parquet, ".arrow": Arrow, ".csv": Csv, ".tsv": Csv}.get(path.suffix.lower(), Jsonl)
    try:
        open_regular(path).close()
        return kind(path)
    except OSError as error:
        problem = UserError(f"{path} cannot be read: {error.strerror or error}")
    except UserError as error:
        problem = error
    if alone or "pip install" in str(problem):
        raise problem from None
    warnings.warn(f"{problem} (skipping it)", stacklevel=2)
    return _Unreadable()


class _Unreadable:
    """An unreadable table, with an unknown number of rows."""

    columns: tuple[str, ...] = ()

    def __len__(self) -> int:
        return 1

    def row(self, index: int) -> dict[str, Any]:
        raise Rejected("damaged table")
