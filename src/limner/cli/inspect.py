"""`limner inspect spikes | underflow`: how stable a run is, and what a number format would lose of its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from limner.cli import dispatch
from limner.cli.arguments import parse, place
from limner.config import load_json
from limner.errors import UserError, printable
from limner.ranges import SEEDS, Checked, Range


@dataclass(frozen=True, kw_only=True)
class SpikesOptions(Checked):
    """Find the spikes of a run's loss, and which matrix foretold them: its RMS_t spikes 1 to 8 steps before
    (Wortsman et al. 2023)."""

    run: Positional[Path]
    """A stage's folder in a run, such as runs/mine/prior."""
    output: Annotated[Path | None, arg(aliases=("-o",))] = None
    """Write a page with the curves."""


@dataclass(frozen=True, kw_only=True)
class UnderflowOptions(Checked):
    """Count the exponents of the gradients of one batch, for each resblock, and what share of them formats lose."""

    run: Positional[Path]
    """The folder of a run."""
    data: Positional[str]
    """Its data."""
    stage: Literal["prior", "contrastive"] = "prior"
    scale: Annotated[float, Range(above=0)] = 1.0
    """What gradients are multiplied by before they are rounded; a resblock's scale begins at 8192."""
    seed: Annotated[int, SEEDS] = 0
    """Of the batch."""


def main(argv: Sequence[str]) -> None:
    dispatch("limner inspect", {"spikes": spikes, "underflow": underflow}, argv)


def spikes(argv: Sequence[str]) -> None:
    """did RMS_t foretell the spikes of the loss?"""
    options = parse(SpikesOptions, argv, "limner inspect spikes")
    if options.output:
        place(options.output)
    from limner.evaluation.foretold import HEADER, foretold

    found = foretold(options.run)
    rows = [row for row in found.rows() if row[1] != "0"]
    said = next(iter(found.found.values())).loss if found.found else []
    steps = f", at steps {', '.join(map(str, said[:8]))}{' ...' if len(said) > 8 else ''}" if said else ""
    print(f"{len(found.loss):,} steps, {len(said)} spike{'s' * (len(said) != 1)} of the loss{steps}")
    print(_table(HEADER, rows) if rows else "RMS_t of no matrix has spiked")
    if options.output:
        print(f"written: {printable(found.save(options.output, f'Spikes of {options.run}'))}")


def underflow(argv: Sequence[str]) -> None:
    """what share of the gradients would formats lose?"""
    options = parse(UnderflowOptions, argv, "limner inspect underflow")
    recipe = options.run / "recipe.json"
    if not recipe.exists():
        raise UserError(f"{options.run} is no run: it has no recipe.json, as `limner train --out` writes it")
    from limner.data.stream import Stream
    from limner.profiling.exponents import SMALLEST, exponents
    from limner.recipes.recipe import Recipe
    from limner.runs.stages import Stages

    run, data = Stages.of(load_json(Recipe, recipe), options.data, options.run).trained(options.stage)
    stream = Stream(data, run.config.batch_size, options.seed)
    parts = exponents(run, next(stream))
    stream.close()
    header = ("gradients of", "98% of exponents", "zeros", *(f"lost in {name}" for name in SMALLEST))
    rows = []
    for part in parts:
        for what, found in (("activations", part.activations), ("parameters", part.parameters)):
            if found is None:
                continue
            low, high = found.range()
            total = int(found.counts.sum()) + found.zeros
            lost = (f"{found.flushed(smallest, options.scale):.1%}" for smallest in SMALLEST.values())
            rows.append((f"{part.name}, {what}", f"{low} to {high}", f"{found.zeros / max(total, 1):.1%}", *lost))
    print(f"{len(parts)} parts, a batch of {run.config.batch_size}, gradients times {options.scale:g}")
    print(_table(header, rows))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[printable(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in cells)
