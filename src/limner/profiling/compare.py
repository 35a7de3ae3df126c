"""Two runs side by side: where a step became faster or slower, by part and by operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from limner.evaluation.confidence import t_quantile
from limner.profiling.distributed_view import PARTS
from limner.profiling.recommendations import format_time
from limner.text_table import render_table

MAX_OPERATORS = 15
TITLES = {"times": "part of a step", "operators": "operator, self time in a step"}
COLUMNS = ("before", "after", "change")

_ROWS = ("total", *PARTS, "overlap", "waiting")


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return what changed between two reports of `analysis.analyze`, in nanoseconds.

    "times" has the mean over ranks and steps of the step and its parts, and half the width of a 95% interval of the
    difference by Student's t, without one if a run has fewer than three steps. "operators" has the self time in a step
    on CPU and GPU of the operators that changed most.
    """
    times = []
    for name in _ROWS:
        first, second = (_by_step(report["steps"], name) for report in (before, after))
        row = {"name": name, "before": float(first.mean()), "after": float(second.mean())}
        if min(len(first), len(second)) > 2:
            variance = first.var(ddof=1) / len(first) + second.var(ddof=1) / len(second)
            row["within"] = float(t_quantile(min(len(first), len(second)) - 1) * np.sqrt(variance))
        times.append(row)
    first, second = (_self_times(report) for report in (before, after))
    operators = [{"name": name, "before": first[name], "after": second[name]} for name in {**first, **second}]
    operators.sort(key=lambda row: -abs(row["after"] - row["before"]))
    return {"times": times, "operators": operators[:MAX_OPERATORS]}


def comparison_table(compared: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Format the tables of `compare` for a terminal."""
    return "\n\n".join(render_table((title, *COLUMNS), rows_of(compared[key])) for key, title in TITLES.items())


def rows_of(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Return the cells of a table: name, times before and after, and the change with its interval."""
    cells = []
    for row in rows:
        change, within = row["after"] - row["before"], row.get("within")
        share = f" ({change / row['before']:+.0%})" if row["before"] else ""
        interval = "" if within is None else f" ± {format_time(within)}"
        sign = "+" if change > 0 else ""
        text = f"{sign}{format_time(change)}{interval}{share}"
        cells.append((row["name"], format_time(row["before"]), format_time(row["after"]), text))
    return cells


def _by_step(steps: Sequence[Mapping[str, int]], name: str) -> np.ndarray:
    """Return the mean over ranks in each step."""
    by_step: dict[int, list[int]] = {}
    for row in steps:
        by_step.setdefault(row["step"], []).append(row[name])
    return np.array([np.mean(values) for values in by_step.values()])


def _self_times(report: Mapping[str, Any]) -> Counter[str]:
    """Return the self times of operators in a step, means over ranks and steps."""
    times = Counter[str]()
    for row in report["operators"]:
        times[row["name"]] += (row["self"] + row["gpu_self"]) / len(report["steps"])
    return times
