"""`limner evaluate composition`: the share of drawings of scenes that show what their captions say."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from limner.cli.arguments import parse, place
from limner.cli.evaluate.shared import Seed, keep, require_scenes
from limner.errors import UserError, printable
from limner.evaluation.seeds import PUBLISHED
from limner.progress import clock, progress
from limner.ranges import Checked, Range
from limner.sampling.options import CANDIDATES, Sampler


@dataclass(frozen=True, kw_only=True)
class ScoreComposition(Checked):
    """Draw captions of the scenes world and let the oracle judge whether everything in them is right.

    Intervals are 95% and over combinations of size, fill, color, shape and background: 30 are held out, which the
    captions share. The gain of more candidates is computed caption by caption, with its interval.
    """

    model: Positional[str] = "scenes"
    """A bundled model by name, or a folder."""
    split: Literal["held-out", "train"] = "held-out"
    """Captions with combinations kept out of training, or of the training kind."""
    captions: Annotated[int, Range(1, 10**6)] = 1_024
    """How many are drawn."""
    things: Annotated[tuple[int, ...], Range(1, 4)] = (1, 2)
    """Numbers of things in a scene, taken in turn."""
    candidates: Annotated[int, CANDIDATES] = 64
    """How many are drawn of each, for the contrastive model to choose from."""
    seed: Seed = PUBLISHED
    sampler: Annotated[Sampler, arg(name="")] = Sampler()
    output: Annotated[Path | None, arg(aliases=("-o",))] = None
    """Write all results as JSON."""


def main(argv: Sequence[str]) -> None:
    """do drawings of scenes show what their captions say?"""
    options = parse(ScoreComposition, argv, "limner evaluate composition")
    if options.output:
        place(options.output)
    if not options.things:
        raise UserError("things must be one number from 1 to 4 at least")
    from limner.evaluation import composition as evaluation
    from limner.pipeline import load

    pipe = load(options.model)
    require_scenes(pipe.dvae.config.size, "name a model of scenes")
    captions = evaluation.captions_for(options.split, options.things, options.captions, options.seed)
    settings = evaluation.CompositionSettings(candidates=options.candidates, seed=options.seed, sampler=options.sampler)
    begun = time.monotonic()
    with progress("drawing and judging", len(captions) * options.candidates, unit="drawing") as bar:
        result = evaluation.score(pipe, captions, settings, progress=bar.advance)
    print(f"{printable(pipe.name)}, {options.split} combinations, {clock(time.monotonic() - begun)}\n{result.table()}")
    keep(result.save, options.output)
