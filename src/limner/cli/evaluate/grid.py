"""`limner evaluate grid`: a sheet of icons, subjects by styles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from limner.cli.arguments import check_writable_png, parse
from limner.errors import escape_control
from limner.evaluation.confidence import TEST_SEEDS_FROM
from limner.progress import progress
from limner.sampling.generation_config import CANDIDATES
from limner.validation import SEEDS, Validated


@dataclass(frozen=True, kw_only=True)
class DrawGrid(Validated):
    """Draw icons on one sheet: a row per subject, a column per style, frames around held-out combinations."""

    model: Positional[str]
    """Name of a bundled model, or a folder."""
    data: Positional[str]
    """A data set of `limner data icons`."""
    output: Annotated[Path, arg(aliases=("-o",))]
    """A PNG file."""
    subjects: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = ()
    """Names of subjects; by default eight subjects with a held-out combination."""
    candidates: Annotated[int, CANDIDATES] = 16
    """Candidates per combination, of which the one with the best score is shown."""
    seed: Annotated[int, SEEDS] = TEST_SEEDS_FROM
    """Seed of the drawings."""
    real: bool = False
    """Show the real picture next to each drawing."""


def main(argv: Sequence[str]) -> None:
    """draw a sheet of icons: subjects down, styles across"""
    options = parse(DrawGrid, argv, "limner evaluate grid")
    check_writable_png(options.output)
    from limner.data.open_source import open_source
    from limner.evaluation.icon_pictures import Icons, draw_cells, grid_cells, render_grid
    from limner.evaluation.report import save_png
    from limner.pipeline import load

    source, pipe = open_source(options.data), load(options.model)
    data = Icons.from_source(source, pipe.dvae.config.size)
    cells = grid_cells(data, options.subjects)
    with progress("drawing", len(cells) * options.candidates, unit="drawing") as bar:
        drawings = draw_cells(pipe, data, cells, options.candidates, options.seed, bar.advance)
    path = save_png(render_grid(data, cells, drawings, options.real), options.output)
    print(f"written: {escape_control(path)}")
