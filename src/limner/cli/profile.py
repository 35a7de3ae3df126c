"""`limner profile TRACES -o report.html`: a report on where the time and memory of training go."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from limner.cli.arguments import OutputFile, parse
from limner.errors import escape_control
from limner.text_table import render_table


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Report where the time and memory of training go, from traces of torch.profiler, one per rank.

    `limner train --profile 10:13` records them in RUN/STAGE/profile. Traces that other programs recorded work too, also
    on GPUs.
    """

    traces: Positional[Annotated[tuple[str, ...], arg(metavar="FOLDER|FILE|URL")]]
    """A folder with the traces of all ranks of a run, or the files; also URLs such as s3://bucket/run."""
    before: Annotated[tuple[str, ...], arg(metavar="FOLDER|FILE|URL ...")] = ()
    """Traces of an earlier run: compare the times of a step and its operators with them."""
    output: OutputFile = None
    """Write the report as an HTML page, or the tables if the name ends in .json."""


def main(argv: Sequence[str]) -> None:
    """Print times and recommendations, and write the report."""
    options = parse(ProfileOptions, argv, "limner profile")
    gc.disable()  # collections would look through millions of events, which form no cycles
    from limner.json_files import write_json
    from limner.profiling.analysis import analyze
    from limner.profiling.compare import compare, comparison_table
    from limner.profiling.distributed_view import PARTS
    from limner.profiling.page import save_report, tables_of
    from limner.profiling.recommendations import format_time
    from limner.profiling.trace import read_traces

    traces = read_traces(options.traces, shown=True)
    report = analyze(traces)
    columns = ("total", *PARTS, "overlap", "waiting")
    rows = [(row["rank"], *(format_time(row[column]) for column in columns)) for row in report["ranks"]]
    print(render_table(("rank", "step", *columns[1:]), rows))
    for advice in report["recommendations"]:
        print(f"- {escape_control(advice['text'])}")
    if options.before:
        report["compared"] = compare(analyze(read_traces(options.before, shown=True)), report)
        print(f"\n{comparison_table(report['compared'])}")
    if output := options.output:
        if output.suffix == ".json":
            write_json(output, tables_of(report), indent=1)
        else:
            save_report(output, report, traces)
        print(f"written: {escape_control(output)}")
