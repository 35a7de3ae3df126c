"""Report of a run's loss spikes and the RMS_t spikes that precede them (Wortsman et al. 2023, Figure 4, Appendix E).

The data is the `stability.jsonl` that `runs/monitors.py` writes.
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
from limner.text_table import render_table
from limner.training.metrics_log import read_metrics

STABILITY_FILE = "stability.jsonl"  # in the folder of a stage
_HEADER = ("matrix", "RMS spikes", "loss spikes", "after an RMS spike", "by chance", "highest RMS")
_ZOOM_STEPS = 40  # steps before and after a spike in its chart
_MAX_CHARTED_SPIKES = 6
_MAX_STEP = 10_000_000  # rows of later steps are ignored


@dataclass(frozen=True)
class SpikeReport:
    """Loss (NaN if not logged) and RMS_t (1 if not logged) of a run for each step from 1 on, RMS_t by matrix.

    `matches` relates their spikes; `features` are mean magnitudes of block outputs at logged steps.
    """

    loss: np.ndarray
    rms: dict[str, np.ndarray]
    matches: dict[str, SpikeMatch]
    features: Mapping[str, Points]

    def rows(self) -> list[tuple[str, ...]]:
        """Return the rows of the table, the most significant matrix first."""
        rows = []
        for name in sorted(self.matches, key=lambda name: (self.matches[name].p_value, -self.rms[name].max())):
            match, highest = self.matches[name], self.rms[name].max()
            counts = map(str, (len(match.rms), len(match.loss), len(match.following)))
            rows.append((name, *counts, f"{match.p_value:.2g}", f"{highest:.1f}"))
        return rows

    def text(self) -> str:
        """Format the numbers of steps and spikes, and the rows with RMS spikes, for a terminal."""
        rows, spikes = [row for row in self.rows() if row[1] != "0"], loss_spikes(self.loss)
        steps = f", at steps {', '.join(map(str, spikes[:8]))}{' ...' if len(spikes) > 8 else ''}" if spikes else ""
        head = f"{len(self.loss):,} steps, {len(spikes)} spike{'s' * (len(spikes) != 1)} of the loss{steps}"
        if rows:
            return f"{head}\n{render_table(_HEADER, rows, align='left')}"
        no_rows = "RMS_t did not spike" if self.matches else "RMS_t was not logged: only Adam and its variants have it"
        return f"{head}\n{no_rows}"

    def save(self, path: Path, title: str) -> Path:
        """Write a page with the curves of the whole run and close-ups of its first spikes."""
        first = self.rows()[0][0] if self.matches else ""
        charts = [chart("loss", {"loss": _points(self.loss)})]
        if first:
            charts.append(chart(f"RMS of {first} (spike: {RMS_SPIKE} or more)", {first: _points(self.rms[first])}))
        if self.features:
            names = list(self.features)
            charted = dict.fromkeys(names[i] for i in np.linspace(0, len(names) - 1, 4).round().astype(int))
            charts.append(chart("mean magnitude of features", {name: self.features[name] for name in charted}))
        close_ups = []
        for step in loss_spikes(self.loss)[:_MAX_CHARTED_SPIKES]:
            begin, end = max(0, step - _ZOOM_STEPS), step + _ZOOM_STEPS
            close_ups.append(chart(f"loss, spike at step {step}", {"loss": _points(self.loss[begin:end], begin)}))
            if first:
                close_ups.append(chart(f"RMS of {first}", {first: _points(self.rms[first][begin:end], begin)}))
        first_step, last_step = FOLLOW_STEPS
        legend = f"A loss spike counts as preceded by an RMS spike that is {first_step} to {last_step} steps earlier."
        body = (
            f"<h1>{escape(title)}</h1><p>{legend}</p>{table(self.rows(), _HEADER)}"
            f'<h2>The run</h2><div class="charts">{"".join(charts)}</div>'
            f'<h2>Loss spikes</h2><div class="charts">{"".join(close_ups)}</div>'
        )
        return save_page(path, title, body)


def spike_report(folder: Path) -> SpikeReport:
    """Read the report of the stage in a folder. Raises `UserError` if the log is empty."""
    path = folder / STABILITY_FILE
    rows = [row for row in read_metrics(path) if 0 < row["step"] <= _MAX_STEP and isinstance(row.get("rms"), dict)]
    if not rows:
        raise UserError(f"no steps in {path}: name a run folder of `limner train`, or a stage folder in it")
    last = max(row["step"] for row in rows)
    loss = np.full(last, math.nan)
    rms = {name: np.ones(last) for name in sorted({name for row in rows for name in row["rms"]})}
    features: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: row["step"]):
        step, magnitudes = row["step"], row.get("features")
        if "loss" in row:
            loss[step - 1] = _number(row["loss"])
        for name, value in row["rms"].items():
            rms[name][step - 1] = _number(value)
        for name, value in magnitudes.items() if isinstance(magnitudes, dict) else ():
            features.setdefault(name, []).append((step, _number(value)))
    return SpikeReport(loss, rms, {name: match_spikes(loss, series) for name, series in rms.items()}, features)


def _number(value: Any) -> float:
    """Infinite where JSON has null, which stands for what is not finite."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.inf


def _points(values: np.ndarray, begin: int = 0) -> Points:
    return [(begin + i + 1, float(value)) for i, value in enumerate(values)]
