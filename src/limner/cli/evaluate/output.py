"""Output of the commands of `limner evaluate`: tables, JSON, a page."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from limner.errors import escape_control

if TYPE_CHECKING:
    from limner.evaluation.result import EvalResult


class Evaluated(NamedTuple):
    """Results of an evaluation.

    Attributes:
        model: name of the model.
        results: may be computed while they are iterated over.
        about: common to all results, such as the split.
        more: further JSON values.
    """

    model: str
    results: Iterable[EvalResult]
    about: str = ""
    more: Mapping[str, Any] = MappingProxyType({})

    def show(self) -> list[EvalResult]:
        """Print the tables, each as soon as it is computed, and return the results."""
        shown = []
        for result in self.results:
            if not shown:
                print(escape_control(", ".join(filter(None, (self.model, self.about)))))
            print(result.table())
            shown.append(result)
        return shown


Shown = Mapping[str, tuple[Evaluated, Sequence["EvalResult"]]]  # by name


def write_reports(output: Path | None, page: Path | None, shown: Shown, argv: Sequence[str]) -> None:
    """Write the results of evaluations as JSON and as a page, if there is a path for it. `argv` computed them."""
    model = next(iter(shown.values()))[0].model
    if page:
        from limner.evaluation.results_page import Section, save_results_page

        sections = [Section(name, evaluated.about, results) for name, (evaluated, results) in shown.items()]
        write_file(page, lambda path: save_results_page(path, model, sections, shlex.join(argv)))
    if output:
        from limner.evaluation.result import save_results

        results = [result for _, part in shown.values() for result in part]
        more = {key: value for evaluated, _ in shown.values() for key, value in evaluated.more.items()}
        write_file(output, lambda path: save_results(path, results, **more, model=model))


def write_file(path: Path | None, save: Callable[[Path], object]) -> None:
    """Call `save` with the path and print the path; do nothing without a path."""
    if path:
        save(path)
        print(f"written: {escape_control(path)}")
