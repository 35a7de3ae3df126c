"""A page of an evaluation of fidelity: tables, and curves over the blur radius and over N (Figure 9)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from limner.evaluation.report import chart, save_page, table
from limner.evaluation.result import EvalResult


def save_fidelity_page(path: Path, results: Sequence[EvalResult]) -> Path:
    """Write the results of `fidelity.evaluate` as a page in one file."""
    settings = results[0].settings
    title = f"Fidelity of {settings['model']}"
    charts = [*_curves(results, "blur", "radius"), *_curves(results, "best_of", "log2 N")]
    body = f"<h1>{escape(title)}</h1><p class=lead>Drawings compared with real pictures by {settings['extractor']}.</p>"
    if charts:
        body += f'<h2>Curves</h2><div class="charts">{"".join(charts)}</div>'
    for result in results:
        rows = [[name, row["drawings"], row.get("floor", "")] for name, row in result.rows.items()]
        body += f"<h2>{escape(result.title)}</h2>" + table(rows, ["", "drawings", "floor"])
    body += "<h2>Settings</h2>" + table([(name, value) for name, value in settings.items()])
    return save_page(path, title, body)


def _curves(results: Sequence[EvalResult], setting: str, label: str) -> list[str]:
    """Return a chart of each metric over a setting, at the first value of the other one."""
    other = "best_of" if setting == "blur" else "blur"
    chosen = [result for result in results if result.settings[other] == results[0].settings[other]]
    if len(chosen) < 2:
        return []
    charts = []
    for name in chosen[0].rows:
        curves: dict[str, list[tuple[float, float]]] = {}
        for result in chosen:
            x = result.settings[setting]
            for column, estimate in result.rows[name].items():
                curves.setdefault(column, []).append((math.log2(x) if setting == "best_of" else x, estimate.value))
        charts.append(chart(name, curves, label))
    return charts
