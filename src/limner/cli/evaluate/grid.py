"""`limner evaluate grid`: a sheet of icons, subjects by styles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from limner.cli.arguments import parse, place_png
from limner.errors import printable
from limner.evaluation.confidence import TEST_SEEDS_FROM
from limner.progress import progress
from limner.sampling.generation_config import CANDIDATES
from limner.validation import SEEDS, Checked


@dataclass(frozen=True, kw_only=True)
class DrawGrid(Checked):
    """Draw icons on one sheet: a row per subject, a column per style, frames around held-out combinations."""

    model: Positional[str]
    """Name of a bundled model, or a folder."""
    data: Positional[str]
    """A data set of `limner data icons`."""
    output: Annotated[Path, arg(aliases=("-o",))]
    """A PNG file."""
    subjects: tuple[str, ...] = ()
    """Names of subjects; by default eight subjects with a held-out combination."""
    candidates: Annotated[int, CANDIDATES] = 16
    """Candidates per combination, of which the one with the best score is shown."""
    seed: Annotated[int, SEEDS] = TEST_SEEDS_FROM
    """Seed of the drawings."""
    real: bool = False
    """Show the real picture next to each drawing."""


def main(argv: Sequence[str]) -> None:
    """draw a sheet of icons, subjects down and styles across"""
    options = parse(DrawGrid, argv, "limner evaluate grid")
    place_png(options.output)
    from limner.data.open_source import open_source
    from limner.evaluation import icon_grid
    from limner.evaluation.icon_pictures import Icons
    from limner.evaluation.report import save_png
    from limner.pipeline import load

    source, pipe = open_source(options.data), load(options.model)
    data = Icons.from_source(source, pipe.dvae.config.size)
    chosen = icon_grid.grid_cells(data, options.subjects)
    with progress("drawing", len(chosen) * options.candidates, unit="drawing") as bar:
        drawings = icon_grid.generate(pipe, data, chosen, options.candidates, options.seed, bar.advance)
    path = save_png(icon_grid.render(data, chosen, drawings, options.real), options.output)
    print(f"written: {printable(path)}")
