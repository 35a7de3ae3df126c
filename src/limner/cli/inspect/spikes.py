"""`limner inspect spikes`: loss spikes of a run, and spikes of RMS_t that precede them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from limner.cli.arguments import check_writable, parse
from limner.cli.inspect.stage_files import records
from limner.errors import UserError, escape_control
from limner.text_table import render_table
from limner.validation import Validated

if TYPE_CHECKING:
    from limner.evaluation.loss_spikes import SpikeReport


@dataclass(frozen=True, kw_only=True)
class SpikesOptions(Validated):
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
        check_writable(options.output)
    from limner.evaluation.loss_spikes import STABILITY_FILE, spike_report

    run = options.run
    stages = {title: path.parent for title, path in records(run, STABILITY_FILE).items()} or {"": run}
    if options.output and len(stages) > 1:
        raise UserError(f"{run} has several stages: name one for a page, such as {next(iter(stages.values()))}")
    reports = {folder: (title, spike_report(folder)) for title, folder in stages.items()}
    print("\n\n".join(_report(title, report) for title, report in reports.values()))
    if options.output:
        ((folder, (_, report)),) = reports.items()
        print(f"written: {escape_control(report.save(options.output, f'Spikes of {folder}'))}")


def _report(title: str, report: SpikeReport) -> str:
    """Return the report on one stage."""
    from limner.evaluation.loss_spikes import HEADER
    from limner.metrics.spikes import loss_spikes

    rows = [row for row in report.rows() if row[1] != "0"]
    spikes = loss_spikes(report.loss)
    steps = f", at steps {', '.join(map(str, spikes[:8]))}{' ...' if len(spikes) > 8 else ''}" if spikes else ""
    no_rows = "RMS_t did not spike" if report.matches else "RMS_t was not logged: only Adam and its variants have it"
    prefix = f"{title}: " if title else ""
    head = f"{prefix}{len(report.loss):,} steps, {len(spikes)} spike{'s' * (len(spikes) != 1)} of the loss{steps}"
    return f"{head}\n{render_table(HEADER, rows, align='left') if rows else no_rows}"
