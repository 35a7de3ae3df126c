"""The tables of benchmarks.md, from the figures in bench/results: `python docs/benchmark_tables.py`.

A line `<!-- bench/results/NAME.json -->` precedes each table. The file holds machines, dates, commands, columns and
rows. A cell is a number, a pair of numbers for an interval, a text, or null if it was not measured. Numbers have the
format of their column, or `{"value": NUMBER, "format": FORMAT}` where it differs.
"""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MARKER = re.compile(r"<!-- (bench/results/[\w-]+\.json) -->\n\n(?:\|.*\n)*\n*")


def page(text: str) -> str:
    """The page with every marked table written from its file, and an empty line after it."""
    return MARKER.sub(lambda match: f"<!-- {match[1]} -->\n\n{table(read(match[1]))}\n", text).rstrip("\n") + "\n"


def read(name: str) -> dict[str, Any]:
    """The content of a file of figures."""
    return json.loads((ROOT / name).read_text("utf-8"))


def table(content: dict[str, Any]) -> str:
    """A Markdown table."""
    columns, formats = content["columns"], content["formats"]
    rows = [[cell(value, form) for value, form in zip(row, formats, strict=True)] for row in content["rows"]]
    head, *body = [f"| {' | '.join(line)} |\n".replace("|  |", "| |") for line in (columns, *rows)]
    return "".join([head, f"|{'---|' * len(columns)}\n", *body])


def cell(value: Any, form: str | None) -> str:
    """A value in the format of its column: `{:.1f}%`, or `{:.1f} to {:.1f}` for an interval."""
    if value is None:
        return "–"
    if isinstance(value, dict):
        value, form = value["value"], value["format"]
    if isinstance(value, str) or form is None:
        return str(value)
    return form.format(*value if isinstance(value, list) else [value]).replace("-", "−")


if __name__ == "__main__":
    path = ROOT / "docs/benchmarks.md"
    path.write_text(page(path.read_text("utf-8")), encoding="utf-8")
