"""Rows of text files. Memory holds only their offsets; a row is parsed when it is read.

.jsonl, .ndjson   a row is a line that is not empty
.csv, .tsv        a row is a record. If a record is broken (an unclosed quote, or several lines whose number of fields
                  differs from that of the columns), its first line is a broken row and the next line begins a record
"""

from __future__ import annotations

import csv
import io
import os
from array import array
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from limner.data.sample import Rejected
from limner.data.sanitize import MAX_COLUMNS, open_regular
from limner.errors import UserError
from limner.json_files import parse_json

MAX_ROW = 1 << 26  # bytes of a row of text
_MAX_LINES = 64  # of a CSV record


class _TextTable:
    """Rows as byte spans in a text file. A span that ends before it begins marks a broken row, and a span
    longer than `MAX_ROW` a row that is too long."""

    def __init__(self, path: Path) -> None:
        self.path, self.columns = path, list[str]()
        spans = array("q")
        with open(path, "rb") as file:
            for span in self._spans_of(file):
                spans.extend(span)
        self._spans = np.array(spans, np.int64).reshape(-1, 2)

    def _spans_of(self, file: BinaryIO) -> Iterator[tuple[int, int]]:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._spans)

    def _text(self, index: int) -> str:
        start, stop = self._spans[index].tolist()
        if stop < start:
            raise Rejected("broken row")
        if stop - start > MAX_ROW:
            raise Rejected("row too long")
        return self._decode(start, stop)

    def _decode(self, start: int, stop: int) -> str:
        """Decode a span. Invalid UTF-8 bytes become surrogates, which `parse_captions` rejects."""
        with open_regular(self.path) as file:
            return os.pread(file.fileno(), stop - start, start).decode("utf-8-sig", "surrogateescape")


class Jsonl(_TextTable):
    """A table with a JSON object per line."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        for index in range(min(len(self), 100)):
            with suppress(Rejected):
                self.columns += [name for name in self.row(index) if name not in self.columns]

    def _spans_of(self, file: BinaryIO) -> Iterator[tuple[int, int]]:
        start = 0
        for line, stop in _lines(file, 0):
            if line.strip() or stop - start > MAX_ROW:
                yield start, stop
            start = stop

    def row(self, index: int) -> dict[str, Any]:
        try:
            row = parse_json(self._text(index))
        except ValueError:
            raise Rejected("broken row") from None
        if not isinstance(row, dict) or len(row) > MAX_COLUMNS:
            raise Rejected("broken row")
        return row


class Csv(_TextTable):
    """A table of comma- or tab-separated values with a header."""

    def __init__(self, path: Path) -> None:
        csv.field_size_limit(MAX_ROW)
        self._delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
        super().__init__(path)

    def _spans_of(self, file: BinaryIO) -> Iterator[tuple[int, int]]:
        start = 0
        while True:
            ends: list[int] = []
            try:
                fields = next(csv.reader(_texts(file, start, ends), delimiter=self._delimiter, strict=True), None)
            except (csv.Error, ValueError):
                fields = None
            if not ends:
                return
            stop = ends[-1]
            if fields is None or (len(ends) > 1 and len(fields) != len(self.columns or fields)):
                stop = ends[0]
                # A single line is valid if only quotes within a field made it fail.
                is_one_line = len(ends) == 1 and stop - start <= MAX_ROW
                fields = self._fields(self._decode(start, stop)) if is_one_line else None
            if fields is None or (self.columns and any(fields[len(self.columns) :])):
                if not self.columns:
                    raise UserError(f"{self.path} has an unreadable header: put column names on the first line")
                yield (start, stop) if stop - start > MAX_ROW else (stop, start)
            elif not self.columns:
                self.columns = fields
            elif fields:
                yield start, stop
            start = stop

    def _fields(self, text: str) -> list[str] | None:
        """Parse a record leniently: quotes within a field are kept. Returns None if that fails."""
        try:
            return next(csv.reader(io.StringIO(text.replace("\0", ""), newline=""), delimiter=self._delimiter), None)
        except csv.Error:
            return None

    def row(self, index: int) -> dict[str, Any]:
        fields = self._fields(self._text(index))
        if fields is None:
            raise Rejected("broken row")
        return dict(zip(self.columns, fields, strict=False))


def _lines(file: BinaryIO, at: int) -> Iterator[tuple[bytes, int]]:
    """Yield the lines from offset `at` on, cut after `MAX_ROW` + 1 bytes, each with the offset of its end."""
    file.seek(at)
    while line := file.readline(MAX_ROW + 1):
        at, piece = at + len(line), line
        while len(piece) > MAX_ROW and not piece.endswith(b"\n"):
            piece = file.readline(MAX_ROW + 1)
            at += len(piece)
        yield line, at


def _texts(file: BinaryIO, at: int, ends: list[int]) -> Iterator[str]:
    """Yield the lines of a record at offset `at` as text, and append the offset of each line's end to `ends`.

    At the end of the file it appends the offset once more: a record that needs another line is broken. Raises
    `ValueError` after `_MAX_LINES` lines and for a line longer than `MAX_ROW`.
    """
    for line, end in _lines(file, at):
        ends.append(end)
        if len(line) > MAX_ROW or len(ends) > _MAX_LINES:
            raise ValueError("too long")
        yield line.decode("utf-8-sig", "surrogateescape").replace("\0", "")
    ends += ends[-1:]
