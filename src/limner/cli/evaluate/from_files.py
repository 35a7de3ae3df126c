"""`limner evaluate votes | compare`: results from files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

from limner.cli.arguments import OutputFile
from limner.cli.evaluate.output import write_file
from limner.validation import Validated

if TYPE_CHECKING:
    from limner.evaluation.result import EvalResult


@dataclass(frozen=True, kw_only=True)
class ScoreVotes(Validated):
    """Count the votes of `limner vote`: majorities, strengths of the models, and the agreement of voters.

    Intervals are 95%, over pairs, and for strengths over votes. Careless voters miss checks, vote in less than a
    second, or disagree with the majority of others; majorities are counted with and without them.
    """

    votes: Positional[Path]
    """The file of votes."""
    output: OutputFile = None
    """Write all results as JSON."""


def votes(options: ScoreVotes) -> None:
    """which model's pictures do people prefer?"""
    from limner.evaluation.votes import VoteStore, tables

    _print(tables(VoteStore.read(options.votes)), options.output)


@dataclass(frozen=True, kw_only=True)
class Compare(Validated):
    """Compare two files of `limner evaluate composition` or `pairs`, written with -o: paired differences on the
    captions that both have, with 95% intervals over combinations.

    Evaluate both models with the same seed and the same number of candidates.
    """

    first: Positional[Path]
    """Results of the first model."""
    second: Positional[Path]
    """Results of the second model. A positive difference says that it is better."""
    output: OutputFile = None
    """Write all results as JSON."""


def compare(options: Compare) -> None:
    """is the second model better than the first?"""
    from limner.evaluation.compare import compare_files

    _print([compare_files(options.first, options.second)], options.output)


def _print(results: list[EvalResult], output: Path | None) -> None:
    from limner.evaluation.result import save_results, tables

    print(tables(results))
    write_file(output, lambda path: save_results(path, results))
