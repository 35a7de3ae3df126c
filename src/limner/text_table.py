"""Plain-text tables for a terminal."""

from collections.abc import Sequence
from typing import Literal

from limner.errors import escape_control


def render_table(
    head: Sequence[str], rows: Sequence[Sequence[object]], align: Literal["left", "right"] = "right"
) -> str:
    """Return a table with a header row and a line below it. `align` applies to all columns but the first."""
    cells = [[escape_control(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    pads = [str.ljust, *[str.ljust if align == "left" else str.rjust] * (len(head) - 1)]
    lines = ["  ".join(pad(cell, n) for pad, cell, n in zip(pads, row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([lines[0], "-" * (sum(widths) + 2 * (len(head) - 1)), *lines[1:]])
