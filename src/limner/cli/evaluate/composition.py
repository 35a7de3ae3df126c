"""`limner evaluate composition`: the share of scene drawings that match their captions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from limner.cli.arguments import check_writable, check_writable_png, parse
from limner.cli.evaluate.shared import Seed, require_scenes, write_result
from limner.errors import UserError, escape_control
from limner.evaluation.confidence import TEST_SEEDS_FROM
from limner.progress import clock, progress
from limner.sampling.generation_config import CANDIDATES, Sampler
from limner.validation import Range, Validated

_MOSAIC_CAPTIONS = 8


@dataclass(frozen=True, kw_only=True)
class ScoreComposition(Validated):
    """Draw captions of synthetic scenes and check with a scene parser if every attribute and relation is right.

    Intervals are 95%, over combinations of size, fill, color, shape and background; all held-out captions share 30
    combinations. The gain of more candidates is a paired difference per caption, with its interval.
    """

    model: Positional[str] = "scenes"
    """Name of a bundled model, or a folder."""
    split: Literal["held-out", "train"] = "held-out"
    """Captions with combinations held out of training, or with combinations of the training split."""
    captions: Annotated[int, Range(1, 10**6)] = 1_024
    """Number of captions to draw."""
    things: Annotated[tuple[int, ...], Range(1, 4)] = (1, 2)
    """Numbers of objects in a scene, used cyclically."""
    candidates: Annotated[int, CANDIDATES] = 64
    """Candidates per caption, of which the one with the best score counts."""
    seed: Seed = TEST_SEEDS_FROM
    sampler: Annotated[Sampler, arg(name="")] = Sampler()
    output: Annotated[Path | None, arg(aliases=("-o",))] = None
    """Write all results as JSON."""
    mosaic: Path | None = None
    """Write a PNG of drawings of the first captions, at most eight, next to real scenes."""


def main(argv: Sequence[str]) -> None:
    """do drawings of scenes show what their captions say?"""
    options = parse(ScoreComposition, argv, "limner evaluate composition")
    if options.output:
        check_writable(options.output)
    if options.mosaic:
        check_writable_png(options.mosaic)
    if not options.things:
        raise UserError("--things needs at least one number from 1 to 4")
    from limner.evaluation import composition as evaluation
    from limner.evaluation.report import save_png
    from limner.evaluation.scene_sheet import render_samples, scene_samples
    from limner.pipeline import load
    from limner.sampling.candidates import Candidates

    pipe = load(options.model)
    require_scenes(pipe.dvae.config.size, "name a model of scenes")
    captions = evaluation.sample_captions(options.split, options.things, options.captions, options.seed)
    settings = evaluation.CompositionSettings(candidates=options.candidates, seed=options.seed, sampler=options.sampler)
    start_time, pictures = time.monotonic(), []

    def keep_first(start: int, candidates: Candidates) -> None:
        pictures.extend(candidates.pictures[: max(0, _MOSAIC_CAPTIONS - start)])

    with progress("drawing and checking", len(captions) * options.candidates, unit="drawing") as bar:
        result = evaluation.score(pipe, captions, settings, progress=bar.advance, on_candidates=keep_first)
    elapsed = clock(time.monotonic() - start_time)
    print(f"{escape_control(pipe.name)}, {options.split} combinations, {elapsed}\n{result.table()}")
    if options.mosaic:
        path = save_png(render_samples(scene_samples(captions, pictures, result)), options.mosaic)
        print(f"written: {escape_control(path)}")
    write_result(result.save, options.output)
