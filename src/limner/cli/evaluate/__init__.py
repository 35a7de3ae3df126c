"""`limner evaluate`: a function for each evaluation. It computes results, which this module prints and writes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from limner.cli import command_name, run_subcommand
from limner.cli.evaluate.fidelity import fidelity
from limner.cli.evaluate.from_files import compare, votes
from limner.cli.evaluate.icons import emoji, glyphs, grid, icons
from limner.cli.evaluate.options import ScoreAll, ScoreFidelity, ScoreOptions, ScoreReconstruction
from limner.cli.evaluate.output import Evaluated, write_reports
from limner.cli.evaluate.scenes import (
    composition,
    detector,
    geneval,
    pairs,
    reconstruction,
    scene_evaluations,
    zero_shot,
)

Evaluation = Callable[[Any], Evaluated]

#: Functions of a subclass of `ScoreOptions`, their annotation. The docstring is the help.
EVALUATIONS: list[Evaluation] = [
    composition, pairs, geneval, fidelity, reconstruction, zero_shot, emoji, icons, glyphs, detector
]  # fmt: skip


def main(argv: Sequence[str]) -> None:
    """Run a subcommand of `limner evaluate`."""
    line = ["limner", "evaluate", *argv]
    single = [_command(evaluate, line) for evaluate in EVALUATIONS]

    def all(options: ScoreAll) -> None:
        """all evaluations on new scenes or on a data set, in one report"""
        _report(options, evaluations_of(options), line)

    run_subcommand("limner evaluate", (all, *single, grid, votes, compare), argv)


def evaluations_of(options: ScoreAll) -> dict[str, Callable[[], Evaluated]]:
    """Return the evaluations of `limner evaluate all` by name: on new scenes, or on a data set if there is one."""
    if options.data is None:
        return scene_evaluations(options)
    common = {"model": options.model, "data": options.data, "seed": options.seed}
    return {
        "reconstruction": lambda: reconstruction(ScoreReconstruction(**common, count=options.captions)),
        "fidelity": lambda: fidelity(ScoreFidelity(**common, captions=options.captions, best_of=(options.candidates,))),
    }


def _command(evaluate: Evaluation, line: Sequence[str]) -> Callable[[Any], None]:
    """Return a command that shows what `evaluate` finds."""

    @functools.wraps(evaluate)
    def command(options: ScoreOptions) -> None:
        _report(options, {command_name(evaluate): lambda: evaluate(options)}, line)

    return command


def _report(options: ScoreOptions, evaluations: dict[str, Callable[[], Evaluated]], line: Sequence[str]) -> None:
    shown = {}
    for name, evaluate in evaluations.items():
        evaluated = evaluate()
        if len(evaluations) > 1:
            print(f"\n{name}")
        shown[name] = evaluated, evaluated.show()
    write_reports(options.output, options.page, shown, line)
