"""Result of an evaluation: a table of estimates, the cases behind it, and settings, as text and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from limner.errors import escape_control
from limner.evaluation.confidence import Estimate
from limner.evaluation.report import SheetRow
from limner.json_files import write_json
from limner.text_table import render_table

__all__ = ["EvalResult", "Verdicts", "save_results", "tables"]

#: By respect ("subject", "style", ...): right or not, or the share that is right, [B].
Verdicts = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """A table of estimates.

    Attributes:
        title: what the rows have in common.
        rows: estimates by row and column.
        cases: JSON values of each case.
        settings: of the evaluation.
        sheet: pictures for a contact sheet.
        charts: curves for a page, inline SVG.
    """

    title: str
    rows: Mapping[str, Mapping[str, Estimate]]
    cases: Sequence[Mapping[str, Any]] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    sheet: Sequence[SheetRow] = ()
    charts: Sequence[str] = ()

    def table(self) -> str:
        """Format the table; the first column has intervals."""
        columns = list(dict.fromkeys(column for row in self.rows.values() for column in row))
        lines = []
        for name, row in self.rows.items():
            cells = [row.get(column) for column in columns]
            lines.append([name, str(cells[0] or ""), *(cell.short if cell else "" for cell in cells[1:])])
        return f"{escape_control(self.title)}\n{render_table(['', *columns], lines)}"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        rows = {name: {column: cell.to_dict() for column, cell in row.items()} for name, row in self.rows.items()}
        return {"title": self.title, "rows": rows, "settings": dict(self.settings), "cases": list(self.cases)}


def tables(results: Sequence[EvalResult]) -> str:
    """Format the tables of several results."""
    return "\n".join(result.table() for result in results)


def save_results(path: str | Path, results: Sequence[EvalResult], **more: Any) -> None:
    """Write results as JSON; `more` are further values."""
    write_json(path, {**more, "results": [result.to_dict() for result in results]}, indent=1, ensure_ascii=False)
