"""`limner evaluate pairs`: the share of lower halves that match the caption, with the upper halves given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from limner.cli.arguments import check_writable, parse
from limner.cli.evaluate.shared import Seed, require_scenes, write_result
from limner.errors import escape_control
from limner.evaluation.confidence import TEST_SEEDS_FROM
from limner.progress import progress
from limner.sampling.generation_config import CANDIDATES, Sampler
from limner.validation import Range, Validated


@dataclass(frozen=True, kw_only=True)
class ScorePairs(Validated):
    """Draw the lower half of a pair ("the exact same scene on the top as a sketch at the bottom") with the upper half
    given, and check it with a scene parser. Intervals are 95%, over combinations, as for `composition`."""

    model: Positional[str] = "scenes"
    """Name of a bundled model, or a folder."""
    split: Literal["held-out", "train"] = "held-out"
    """Pairs with combinations held out of training, or with combinations of the training split."""
    pairs: Annotated[int, Range(1, 10**6)] = 1_024
    """Number of pairs to draw."""
    candidates: Annotated[int, CANDIDATES] = 16
    """Candidates per pair, of which the likeliest under the prior counts."""
    seed: Seed = TEST_SEEDS_FROM
    sampler: Annotated[Sampler, arg(name="")] = Sampler()
    output: Annotated[Path | None, arg(aliases=("-o",))] = None
    """Write all results as JSON."""


def main(argv: Sequence[str]) -> None:
    """given the upper half, does the lower half match the caption?"""
    options = parse(ScorePairs, argv, "limner evaluate pairs")
    if options.output:
        check_writable(options.output)
    from limner.evaluation import composition as evaluation
    from limner.pipeline import load

    pipe = load(options.model)
    require_scenes(pipe.dvae.config.size, "name a model of scenes")
    pairs = evaluation.sample_pairs(options.split, options.pairs, options.seed)
    settings = evaluation.CompositionSettings(candidates=options.candidates, seed=options.seed, sampler=options.sampler)
    with progress("drawing and checking", len(pairs) * options.candidates, unit="drawing") as bar:
        result = evaluation.score_pairs(pipe, pairs, settings, progress=bar.advance)
    print(f"{escape_control(pipe.name)}, {options.split} combinations\n{result.table()}")
    write_result(result.save, options.output)
