"""The report of a reproduction: the paper's claim, whether the claim holds at this scale, and the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from limner import text_table
from limner.atomic_io import atomic_write_text
from limner.evaluation.report import Points, chart, chart_svg, save_page, table
from limner.json_files import write_json


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The outcome of an experiment.

    Attributes:
        name: name of the command.
        claim: the paper's finding, in a sentence.
        source: paper and section.
        holds: True if the claim holds here; None if the trials do not decide.
        verdict: the result here, in a sentence or two.
        header, rows: the table.
        curves: charts by title, each with curves by name, over steps or the title's axis ("loss, over width").
        settings: settings of the trials, including seeds.
    """

    name: str
    claim: str
    source: str
    holds: bool | None
    verdict: str
    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    curves: Mapping[str, Mapping[str, Points]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def answer(self) -> str:
        return {True: "holds here", False: "does not hold here", None: "is undecided here"}[self.holds]

    def text(self) -> str:
        """Format for a terminal."""
        rows = text_table.render_table(self.header, self.rows, align="left")
        return f"{self.claim} ({self.source})\n\n{rows}\n\nThis {self.answer}. {self.verdict}"

    def save(self, folder: Path) -> Path:
        """Write `NAME.json`, charts `NAME-1.svg` and so on, and the page `NAME.html`. Returns the page's path."""
        folder.mkdir(parents=True, exist_ok=True)
        values = {key: value for key, value in vars(self).items() if key != "curves"}
        write_json(folder / f"{self.name}.json", values, indent=1, ensure_ascii=False)
        charts = [_chart(title, curves) for title, curves in self.curves.items()]
        for i, svg in enumerate(charts, 1):
            atomic_write_text(folder / f"{self.name}-{i}.svg", chart_svg(svg))
        css_class = {True: "good", False: "bad", None: "dim"}[self.holds]
        body = (
            f"<h1>{escape(self.name)}</h1><p class=lead>{escape(self.claim)} <small>{escape(self.source)}</small></p>"
            f"<p class={css_class}><b>This {self.answer}.</b> {escape(self.verdict)}</p>"
            + table(self.rows, self.header)
            + (f'<h2>Curves</h2><div class="charts">{"".join(charts)}</div>' if charts else "")
            + "<h2>Settings</h2>"
            + table(list(self.settings.items()))
        )
        return save_page(folder / f"{self.name}.html", self.name, body)


def _chart(title: str, curves: Mapping[str, Points]) -> str:
    title, _, axis = title.partition(" over ")
    return chart(title.rstrip(","), curves, axis or "steps")
