"""Columns of text for commands that print tables."""

from __future__ import annotations

from collections.abc import Sequence

from limner.profiling.cost import GB


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, numbers to the right."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    made = [
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    ]
    return "\n".join([made[0], "-" * len(made[0]), *made[1:]]).replace(" \n", "\n")


def gb(value: float) -> str:
    """Bytes as billions of them."""
    return f"{value / GB:,.2f}"
