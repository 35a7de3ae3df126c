"""Attribution of training pictures from their metadata: set, author, license and source.

A table is a list of rows {"set", "author", "license", "source": text if known, "pictures": their number}, sorted by
descending number. It has at most `MAX_ROWS` such rows; a last row that holds only "pictures" counts the remaining ones.
Rows count only pictures with a license or an author.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from limner.data.sample import Rejected, Source
from limner.errors import escape_control

MAX_ROWS = 1_000
KEYS = ("set", "author", "license", "source")
_MAX_LENGTH = 200  # characters of a value
_MAX_COUNT = 1 << 53  # pictures in a row
_OTHERS = ("",) * len(KEYS)
_Row = tuple[str, ...]


def attribution(source: Source) -> list[dict[str, Any]]:
    """Return the table of a source's pictures, without those whose metadata is unreadable.

    A picture counts once in a row. If mappings in its metadata attribute parts of it, it counts in their rows, too.
    """
    return _table((row, 1) for row in _rows(source))


def _rows(source: Source) -> Iterator[_Row]:
    for index in range(len(source)):
        with suppress(Rejected):
            meta = source.meta(index)
            parts = [meta, *(value for value in meta.values() if isinstance(value, dict))]
            yield from sorted({_row(part) for part in parts if part.get("license") or part.get("author")})


def merge_attributions(*tables: object) -> list[dict[str, Any]]:
    """Merge tables. The tables are untrusted: invalid rows are omitted.

    Tables may count the same pictures, so a row in several tables gets its largest count, not the sum.
    """
    largest: dict[_Row, int] = {}
    for table in tables:
        for row in table if isinstance(table, list) else ():
            if isinstance(row, dict) and type(count := row.get("pictures")) is int and 0 < count < _MAX_COUNT:
                largest[_row(row)] = max(count, largest.get(_row(row), 0))
    return _table(largest.items())


def _row(meta: Mapping[str, Any]) -> _Row:
    return tuple("" if (value := meta.get(key)) is None else escape_control(value)[:_MAX_LENGTH] for key in KEYS)


def _table(counted: Iterable[tuple[_Row, int]]) -> list[dict[str, Any]]:
    """Sum counts by row. After `MAX_ROWS` different rows, one row counts the rest, to bound memory."""
    counts: Counter[_Row] = Counter()
    others = 0
    for row, count in counted:
        if row == _OTHERS or (row not in counts and len(counts) == MAX_ROWS):
            others += count
        else:
            counts[row] += count
    rows = sorted(counts.items(), key=lambda item: (-item[1], item[0])) + ([(_OTHERS, others)] if others else [])
    return [
        {key: value for key, value in zip(KEYS, row, strict=True) if value} | {"pictures": count} for row, count in rows
    ]
