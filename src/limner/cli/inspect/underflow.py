"""`limner inspect underflow`: share of a run's gradients that would underflow in each format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from limner.cli.arguments import parse, place
from limner.config import load_json
from limner.errors import UserError, printable
from limner.text_table import table
from limner.validation import SEEDS, Checked, Range


@dataclass(frozen=True, kw_only=True)
class UnderflowOptions(Checked):
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
        place(options.output)
    recipe = options.run / "recipe.json"
    if not recipe.exists():
        raise UserError(f"{options.run} is no run: it has no recipe.json, as `limner train --out` writes it")
    from limner.data.stream import Stream
    from limner.layers.low_precision import to_linear
    from limner.profiling.grad_histogram import SMALLEST_SUBNORMAL, gradient_exponents
    from limner.recipes.recipe import Recipe
    from limner.runs.run_data import RunData
    from limner.runs.stages import StageTrainer

    run, data = StageTrainer(RunData.open(load_json(Recipe, recipe), options.data, options.run)).restore(options.stage)
    to_linear(run.model)
    stream = Stream(data, run.config.batch_size, options.seed)
    parts = gradient_exponents(run, next(stream))
    stream.close()
    header = ("gradients of", "98% of exponents", "zeros", *(f"lost in {name}" for name in SMALLEST_SUBNORMAL))
    rows = []
    for part in parts:
        for what, found in (("activations", part.activations), ("parameters", part.parameters)):
            if found is None:
                continue
            low, high = found.central_range()
            total = int(found.counts.sum()) + found.zeros
            lost = (f"{found.underflow(smallest, options.scale):.1%}" for smallest in SMALLEST_SUBNORMAL.values())
            rows.append((f"{part.name}, {what}", f"{low} to {high}", f"{found.zeros / max(total, 1):.1%}", *lost))
    said = f"{len(parts)} parts, a batch of {run.config.batch_size}, gradients times {options.scale:g}"
    print(f"{said}\n{table(header, rows)}")
    if options.output:
        from limner.evaluation import report

        charts = [report.chart(part.name, part.shares(), x_label="floor(log2|gradient|)") for part in parts]
        body = f'<p>{said}</p>{report.table(rows, header)}<div class="charts">{"".join(charts)}</div>'
        title = f"Exponents of the gradients of {options.run}"
        print(f"written: {printable(report.save_page(options.output, title, f'<h1>{escape(title)}</h1>{body}'))}")
