"""Plain-text tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from limner.errors import printable


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table with left-aligned columns, a header row and a line below it."""
    return _columns(head, rows, str.ljust)


def figures(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table for numbers: all columns but the first are right-aligned."""
    return _columns(head, rows, str.rjust)


def _columns(head: Sequence[str], rows: Sequence[Sequence[object]], rest: Callable[[str, int], str]) -> str:
    cells = [[printable(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = [str.ljust, *[rest] * (len(head) - 1)]
    lines = ["  ".join(side(*cell) for side, *cell in zip(sides, row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([lines[0], "-" * (sum(widths) + 2 * (len(head) - 1)), *lines[1:]])
