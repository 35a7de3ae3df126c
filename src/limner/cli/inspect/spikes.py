"""`limner inspect spikes`: loss spikes of a run, and spikes of RMS_t that precede them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from limner.cli.arguments import parse, place
from limner.cli.inspect.stage_files import records
from limner.errors import UserError, printable
from limner.text_table import table
from limner.validation import Checked

if TYPE_CHECKING:
    from limner.evaluation.loss_spikes import SpikeReport


@dataclass(frozen=True, kw_only=True)
class SpikesOptions(Checked):
    """Find loss spikes of a run, and the matrices that predict them: their RMS_t spikes 1 to 8 steps earlier
    (Wortsman et al. 2023)."""

    run: Positional[Path]
    """A run of `limner train`, or the folder of one of its stages, such as runs/mine/prior."""
    output: Annotated[Path | None, arg(aliases=("-o",))] = None
    """Write a page with the curves of one stage."""


def main(argv: Sequence[str]) -> None:
    """did RMS_t predict the spikes of the loss?"""
    options = parse(SpikesOptions, argv, "limner inspect spikes")
    if options.output:
        place(options.output)
    from limner.evaluation.loss_spikes import STABILITY_FILE, spike_report

    run = options.run
    stages = {title: path.parent for title, path in records(run, STABILITY_FILE).items()} or {"": run}
    if options.output and len(stages) > 1:
        raise UserError(f"{run} has several stages: for a page name one, such as {next(iter(stages.values()))}")
    found = {folder: (title, spike_report(folder)) for title, folder in stages.items()}
    print("\n\n".join(_report(title, one) for title, one in found.values()))
    if options.output:
        ((folder, (_, one)),) = found.items()
        print(f"written: {printable(one.save(options.output, f'Spikes of {folder}'))}")


def _report(title: str, found: SpikeReport) -> str:
    """Return the report on one stage."""
    from limner.evaluation.loss_spikes import HEADER
    from limner.metrics.spikes import loss_spikes

    rows = [row for row in found.rows() if row[1] != "0"]
    said = loss_spikes(found.loss)
    steps = f", at steps {', '.join(map(str, said[:8]))}{' ...' if len(said) > 8 else ''}" if said else ""
    none = "RMS_t of no matrix has spiked" if found.matches else "no RMS_t was logged: only Adam and its kin have one"
    of = f"{title}: " if title else ""
    head = f"{of}{len(found.loss):,} steps, {len(said)} spike{'s' * (len(said) != 1)} of the loss{steps}"
    return f"{head}\n{table(HEADER, rows) if rows else none}"
