"""`limner inspect spikes`: the spikes of a run's loss, and whether RMS_t foretold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from limner.cli.arguments import parse, place
from limner.columns import table
from limner.errors import printable
from limner.ranges import Checked


@dataclass(frozen=True, kw_only=True)
class SpikesOptions(Checked):
    """Find the spikes of a run's loss, and which matrix foretold them: its RMS_t spikes 1 to 8 steps before
    (Wortsman et al. 2023)."""

    run: Positional[Path]
    """A stage's folder in a run, such as runs/mine/prior."""
    output: Annotated[Path | None, arg(aliases=("-o",))] = None
    """Write a page with the curves."""


def main(argv: Sequence[str]) -> None:
    """did RMS_t foretell the spikes of the loss?"""
    options = parse(SpikesOptions, argv, "limner inspect spikes")
    if options.output:
        place(options.output)
    from limner.evaluation.foretold import HEADER, foretold
    from limner.metrics.spikes import loss_spikes

    found = foretold(options.run)
    rows = [row for row in found.rows() if row[1] != "0"]
    said = loss_spikes(found.loss)
    steps = f", at steps {', '.join(map(str, said[:8]))}{' ...' if len(said) > 8 else ''}" if said else ""
    print(f"{len(found.loss):,} steps, {len(said)} spike{'s' * (len(said) != 1)} of the loss{steps}")
    none = "RMS_t of no matrix has spiked" if found.found else "no RMS_t was logged: only Adam and its kin have one"
    print(table(HEADER, rows) if rows else none)
    if options.output:
        print(f"written: {printable(found.save(options.output, f'Spikes of {options.run}'))}")
