"""`limner reproduce`: experiments on findings of the papers, at the scale of one machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from limner.cli import two_columns, validate_choice
from limner.cli.arguments import NewFolder, parse


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """Run the experiment behind a finding of the papers, and check the finding on this machine.

    Each takes at most 20 minutes on two cores. After Ctrl-C, the same command resumes with the unfinished trials.
    """

    name: Positional[str]
    """Name of the finding; `limner reproduce` without a name lists all."""
    quick: bool = False
    """Run a few short trials, which test the command but not the finding."""
    output: Annotated[NewFolder, arg(aliases=("-o",), metavar="FOLDER")] = Path("reproduced")
    """Folder for the page with table and curves, and for the trials."""


def main(argv: Sequence[str]) -> None:
    """Reproduce a finding, or list all of them."""
    from limner.experiments import EXPERIMENTS, load

    if not argv:
        claims = {name: load(name).claim for name in EXPERIMENTS}
        print(f"usage: limner reproduce NAME [--quick] [-o FOLDER]\n\n{two_columns(claims)}")
        return
    options = parse(Reproduce, argv, "limner reproduce")
    name = validate_choice(options.name, tuple(EXPERIMENTS), "finding")
    experiment = load(name)
    finding = experiment.reproduce(options.output / "trials" / name, options.quick)
    if options.quick:
        finding = replace(finding, holds=None)
    page = finding.save(options.output, name, experiment)
    print(finding.text(experiment))
    if options.quick:
        print("Quick trials only show that the command works; they do not test the finding.")
    print(f"The page is {page}")
