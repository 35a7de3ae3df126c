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
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from limner.data.sample import Rejected
from limner.data.sanitize import MAX_COLUMNS, READ_FLAGS
from limner.errors import UserError
from limner.json_files import parse_json

MAX_ROW = 1 << 26  # bytes of a row of text
_MAX_LINES = 64  # of a CSV record


class _Lines:
    """Rows as byte spans in a text file. A span that ends before it begins marks a broken row, and a span
    longer than `MAX_ROW` a row that is too long."""

    def __init__(self, path: Path) -> None:
        self.path, self.columns = path, list[str]()
        self._spans = np.zeros((0, 2), np.int64)

    def __len__(self) -> int:
        return len(self._spans)

    def _text(self, index: int) -> str:
        """Return a row's text. Invalid UTF-8 bytes become surrogates, which `parse_captions` rejects."""
        start, stop = self._spans[index].tolist()
        if stop < start:
            raise Rejected("broken row")
        if stop - start > MAX_ROW:
            raise Rejected("row too long")
        descriptor = os.open(self.path, READ_FLAGS)
        try:
            return os.pread(descriptor, stop - start, start).decode("utf-8-sig", "surrogateescape")
        finally:
            os.close(descriptor)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield lines that end in "\\n", in pieces of at most `MAX_ROW` bytes."""
    return iter(lambda: file.readline(MAX_ROW), b"")


class Jsonl(_Lines):
    """A table with a JSON object per line."""

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


class Csv(_Lines):
    """A table of comma- or tab-separated values with a header."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        csv.field_size_limit(MAX_ROW)
        self._delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
        spans = array("q")
        with open(path, "rb") as file:
            for start, stop, fields in self._records(file):
                if not self.columns:
                    if fields is None:
                        raise UserError(f"{path} has an unreadable header: put column names on the first line")
                    self.columns = fields
                else:
                    spans.extend((start, stop) if fields is not None or stop - start > MAX_ROW else (stop, start))
        self._spans = np.array(spans, np.int64).reshape(-1, 2)

    def _records(self, file: BinaryIO) -> Iterator[tuple[int, int, list[str] | None]]:
        """Yield start, end and fields of each record that is not empty (fields None if broken)."""
        at, size = 0, os.fstat(file.fileno()).st_size
        while at < size:
            lines = _LineIterator(file, at)
            reader = csv.reader(lines, delimiter=self._delimiter, strict=True)
            intact = True
            while intact and at < size:
                lines.ends.clear()
                try:
                    fields = next(reader)
                except (csv.Error, ValueError):
                    fields = None
                if not lines.ends:
                    return
                intact = fields is not None and (len(lines.ends) == 1 or len(fields) == len(self.columns or fields))
                stop = lines.ends[-1 if intact else 0]
                if not intact:  # valid if only quotes within a field made it fail
                    text = lines.text if len(lines.ends) == 1 else None
                    fields = None if text is None else self._parse_leniently(text)
                if fields is None or (self.columns and any(fields[len(self.columns) :])):
                    yield at, stop, None
                elif fields:
                    yield at, stop, fields
                at = stop

    def _parse_leniently(self, text: str) -> list[str] | None:
        try:
            return next(csv.reader(io.StringIO(text, newline=""), delimiter=self._delimiter), None)
        except csv.Error:
            return None

    def row(self, index: int) -> dict[str, Any]:
        fields = self._parse_leniently(self._text(index).replace("\0", ""))
        if fields is None:
            raise Rejected("broken row")
        return dict(zip(self.columns, fields, strict=False))


class _LineIterator:
    """An iterator over text lines from an offset on. `ends` collects the end offsets of a record's lines.

    Raises `ValueError` if a record has too many lines or a line is too long.
    """

    def __init__(self, file: BinaryIO, at: int) -> None:
        file.seek(at)
        self.file, self.at, self.ends = file, at, list[int]()
        self.text: str | None = None  # the last line, or None if it was too long

    def __iter__(self) -> _LineIterator:
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
