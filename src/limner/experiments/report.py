"""The report of an experiment: the paper's claim, whether the claim holds at this scale, and the numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from limner import text_table
from limner.atomic_io import atomic_write_text
from limner.evaluation.report import Points, chart, chart_svg, save_page, table
from limner.json_files import write_json


@dataclass(frozen=True)
class Finding:
    """The outcome of an experiment.

    Attributes:
        holds: True if the claim holds here; None if the trials do not decide.
        verdict: the result here, in a sentence or two.
        header, rows: the table.
        curves: charts by title, each with curves by name, over steps or the title's axis ("loss, over width").
        settings: settings of the trials, including seeds.
    """

    holds: bool | None
    verdict: str
    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    curves: Mapping[str, Mapping[str, Points]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def answer(self) -> str:
        return {True: "holds here", False: "does not hold here", None: "is undecided here"}[self.holds]

    def text(self, experiment: Experiment) -> str:
        """Format for a terminal."""
        rows = text_table.render_table(self.header, self.rows, align="left")
        return f"{experiment.claim} ({experiment.source})\n\n{rows}\n\nThis {self.answer}. {self.verdict}"

    def save(self, folder: Path, name: str, experiment: Experiment) -> Path:
        """Write `NAME.json`, charts `NAME-1.svg` and so on, and the page `NAME.html`. Returns the page's path."""
        folder.mkdir(parents=True, exist_ok=True)
        values = {"name": name, "claim": experiment.claim, "source": experiment.source, **vars(self)}
        del values["curves"]
        write_json(folder / f"{name}.json", values, indent=1, ensure_ascii=False)
        charts = []
        for number, (title, curves) in enumerate(self.curves.items(), 1):
            title, _, axis = title.partition(" over ")
            charts.append(chart(title.rstrip(","), curves, axis or "steps"))
            atomic_write_text(folder / f"{name}-{number}.svg", chart_svg(charts[-1]))
        css_class = {True: "good", False: "bad", None: "dim"}[self.holds]
        body = (
            f"<h1>{escape(name)}</h1><p class=lead>{escape(experiment.claim)} "
            f"<small>{escape(experiment.source)}</small></p>"
            f"<p class={css_class}><b>This {self.answer}.</b> {escape(self.verdict)}</p>"
            + table(self.rows, self.header)
            + (f'<h2>Curves</h2><div class="charts">{"".join(charts)}</div>' if charts else "")
            + "<h2>Settings</h2>"
            + table(list(self.settings.items()))
        )
        return save_page(folder / f"{name}.html", name, body)


@dataclass(frozen=True)
class Experiment:
    """A finding of a paper, and the trials that check it.

    Attributes:
        claim: the finding in a sentence.
        source: paper and section.
        reproduce: takes the folder of the trials' results, and True for a few short trials as a smoke test.
    """

    claim: str
    source: str
    reproduce: Callable[[Path, bool], Finding]


def experiment(claim: str, source: str) -> Callable[[Callable[[Path, bool], Finding]], Experiment]:
    """Return a decorator that makes a function `reproduce` an `Experiment`."""
    return lambda reproduce: Experiment(claim, source, reproduce)
