"""Which spikes of a run's loss its RMS_t foretold: a table and a page (Wortsman et al. 2023, Figure 4 and Appendix E).

It reads the `stability.jsonl` that `training/rms_monitor.py` writes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from limner.errors import UserError
from limner.evaluation.report import Points, chart, save_page, table
from limner.metrics.spikes import FOLLOW_STEPS, RMS_SPIKE, SpikeMatch, loss_spikes, match_spikes
from limner.training.metrics_log import read_metrics

FILE = "stability.jsonl"  # in a stage's folder
HEADER = ("matrix", "RMS spikes", "loss spikes", "after an RMS spike", "by chance", "highest RMS")
_AROUND = 40  # steps before and after a spike that the page shows
_SHOWN = 6  # spikes with a chart of their own
_MAX_STEP = 10_000_000  # of a row; those after it are left out


@dataclass(frozen=True)
class Foretold:
    """A run's loss and RMS_t, a value for each step from 1 on; `found` compares their spikes, by matrix.
    `features` are the mean magnitudes of what blocks give, at some steps."""

    loss: np.ndarray
    rms: dict[str, np.ndarray]
    found: dict[str, SpikeMatch]
    features: Mapping[str, Points]

    def rows(self) -> list[tuple[str, ...]]:
        """Matrices whose spikes foretell most first."""
        order = sorted(self.found, key=lambda name: (self.found[name].p_value, -self.rms[name].max()))
        rows = []
        for name in order:
            found, highest = self.found[name], self.rms[name].max()
            counts = map(str, (len(found.rms), len(found.loss), len(found.following)))
            rows.append((name, *counts, f"{found.p_value:.2g}", f"{highest:.1f}"))
        return rows

    def save(self, path: Path, title: str) -> Path:
        """The page: all of the run, and its first spikes from near."""
        first = self.rows()[0][0] if self.found else ""
        charts = [chart("loss", {"loss": _points(self.loss)})]
        if first:
            charts.append(chart(f"RMS of {first} ({RMS_SPIKE} is a spike)", {first: _points(self.rms[first])}))
        if self.features:
            names = list(self.features)
            some = dict.fromkeys(names[i] for i in np.linspace(0, len(names) - 1, 4).round().astype(int))
            charts.append(chart("mean magnitude of features", {name: self.features[name] for name in some}))
        near = []
        for step in loss_spikes(self.loss)[:_SHOWN]:
            begin, end = max(0, step - _AROUND), step + _AROUND
            near.append(chart(f"loss, spike at step {step}", {"loss": _points(self.loss[begin:end], begin)}))
            if first:
                near.append(chart(f"RMS of {first}", {first: _points(self.rms[first][begin:end], begin)}))
        said = f"A loss spike comes after an RMS spike if it follows by {FOLLOW_STEPS[0]} to {FOLLOW_STEPS[1]} steps."
        body = (
            f"<h1>{escape(title)}</h1><p>{said}</p>{table(self.rows(), HEADER)}"
            f'<h2>The run</h2><div class="charts">{"".join(charts)}</div>'
            f'<h2>Loss spikes</h2><div class="charts">{"".join(near)}</div>'
        )
        return save_page(path, title, body)


def foretold(folder: Path) -> Foretold:
    """Of the stage in a folder. Raises `UserError` if it logged no steps."""
    path = folder / FILE
    rows = [row for row in read_metrics(path) if 0 < row["step"] <= _MAX_STEP and isinstance(row.get("rms"), dict)]
    if not rows:
        raise UserError(f"{folder} has no steps in {FILE}: name a run of `limner train`, or a stage's folder in it")
    last = max(row["step"] for row in rows)
    names = {name for row in rows for name in row["rms"]}

    def values(key: str, absent: float, of: str = "") -> np.ndarray:
        found = np.full(last, absent)
        for row in rows:
            if key in (part := row[of] if of else row):
                found[row["step"] - 1] = _number(part[key])
        return found

    loss = values("loss", math.nan)
    rms = {name: values(name, 1.0, "rms") for name in sorted(names)}
    features: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: row["step"]):
        if isinstance(found := row.get("features"), dict):
            for name, value in found.items():
                features.setdefault(name, []).append((row["step"], _number(value)))
    return Foretold(loss, rms, {name: match_spikes(loss, those) for name, those in rms.items()}, features)


def _number(value: Any) -> float:
    """Infinite where JSON has null, which stands for what is not finite."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.inf


def _points(values: np.ndarray, begin: int = 0) -> Points:
    return [(begin + i + 1, float(value)) for i, value in enumerate(values)]
