"""Files that the commands of `limner evaluate` write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from limner.cli.evaluate.options import ScoreOptions
from limner.errors import escape_control

if TYPE_CHECKING:
    from limner.evaluation.result import EvalResult


def write_results(options: ScoreOptions, results: Sequence[EvalResult], **more: Any) -> None:
    """Write the results and `more` values to the file that the options name, if they name one."""
    from limner.evaluation.result import save_results

    write_file(options.output, lambda path: save_results(path, results, **more))


def write_file(path: Path | None, save: Callable[[Path], object]) -> None:
    """Call `save` with the path and print the path; do nothing without a path."""
    if path:
        save(path)
        print(f"written: {escape_control(path)}")
