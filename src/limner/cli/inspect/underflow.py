"""`limner inspect underflow`: share of a run's gradients that would underflow in each format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from limner.cli.arguments import check_writable, parse
from limner.config import load_json
from limner.errors import UserError, escape_control
from limner.text_table import render_table
from limner.validation import SEEDS, Range, Validated


@dataclass(frozen=True, kw_only=True)
class UnderflowOptions(Validated):
    """Count exponents of the gradients of one batch per resblock, and the share that underflows in each format."""

    run: Positional[Path]
    """The folder of a run."""
    data: Positional[str]
    """Training data of the run."""
    stage: Literal["prior", "contrastive"] = "prior"
    """Stage whose model is inspected."""
    scale: Annotated[float, Range(1e-12, 2**40)] = 1.0
    """Factor on gradients before rounding; the scale of a resblock starts at 8192."""
    seed: Annotated[int, SEEDS] = 0
    """Seed of the batch."""
    output: Annotated[Path | None, arg(aliases=("-o",))] = None
    """Write a page with the histograms of the exponents."""


def main(argv: Sequence[str]) -> None:
    """what share of the gradients would underflow?"""
    options = parse(UnderflowOptions, argv, "limner inspect underflow")
    if options.output:
        check_writable(options.output)
    recipe = options.run / "recipe.json"
    if not recipe.exists():
        raise UserError(f"{options.run} lacks recipe.json: name the --out folder of `limner train`")
    from limner.data.stream import Stream
    from limner.planner.grad_histogram import SMALLEST_SUBNORMAL, gradient_exponents
    from limner.quantization.low_precision import to_linear
    from limner.recipes.recipe import Recipe
    from limner.runs.run_data import RunData
    from limner.runs.stages import restore

    run, data = restore(RunData.open(load_json(Recipe, recipe), options.data, options.run), options.stage)
    to_linear(run.model)
    stream = Stream(data, run.config.batch_size, options.seed)
    parts = gradient_exponents(run, next(stream))
    stream.close()
    header = ("gradients of", "98% of exponents", "zeros", *(f"lost in {name}" for name in SMALLEST_SUBNORMAL))
    rows = []
    for module, kinds in parts.items():
        for kind, exponents in kinds.items():
            low, high = exponents.central_range()
            total = int(exponents.counts.sum()) + exponents.zeros
            lost = (f"{exponents.underflow(limit, options.scale):.1%}" for limit in SMALLEST_SUBNORMAL.values())
            rows.append((f"{module}, {kind}", f"{low} to {high}", f"{exponents.zeros / max(total, 1):.1%}", *lost))
    summary = f"{len(parts)} parts, a batch of {run.config.batch_size}, gradients times {options.scale:g}"
    print(f"{summary}\n{render_table(header, rows, align='left')}")
    if options.output:
        from limner.evaluation import report

        charts = [
            report.chart(
                module, {kind: x.shares() for kind, x in parts[module].items()}, x_label="floor(log2|gradient|)"
            )
            for module in parts
        ]
        body = f'<p>{summary}</p>{report.table(rows, header)}<div class="charts">{"".join(charts)}</div>'
        title = f"Exponents of the gradients of {options.run}"
        print(f"written: {escape_control(report.save_page(options.output, title, f'<h1>{escape(title)}</h1>{body}'))}")
