"""`limner evaluate pairs`: the share of lower halves that are drawn as the caption says, the upper ones given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from limner.cli.arguments import parse, place
from limner.cli.evaluate.shared import Seed, keep, require_scenes
from limner.errors import printable
from limner.evaluation.confidence import TEST_SEEDS_FROM
from limner.progress import progress
from limner.sampling.generation_config import CANDIDATES, Sampler
from limner.validation import Checked, Range


@dataclass(frozen=True, kw_only=True)
class ScorePairs(Checked):
    """Give the upper half of a pair ("the exact same scene on the top as a sketch at the bottom") and let the
    oracle judge the lower half that is drawn. Intervals are 95% and over combinations, as of `composition`."""

    model: Positional[str] = "scenes"
    """A bundled model by name, or a folder."""
    split: Literal["held-out", "train"] = "held-out"
    """Pairs with combinations kept out of training, or of the training kind."""
    pairs: Annotated[int, Range(1, 10**6)] = 1_024
    """How many are drawn."""
    candidates: Annotated[int, CANDIDATES] = 16
    """How many are drawn of each, of which the likeliest under the prior is chosen."""
    seed: Seed = TEST_SEEDS_FROM
    sampler: Annotated[Sampler, arg(name="")] = Sampler()
    output: Annotated[Path | None, arg(aliases=("-o",))] = None
    """Write all results as JSON."""


def main(argv: Sequence[str]) -> None:
    """given the upper half, is the lower half drawn as the caption says?"""
    options = parse(ScorePairs, argv, "limner evaluate pairs")
    if options.output:
        place(options.output)
    from limner.evaluation import composition as evaluation
    from limner.pipeline import load

    pipe = load(options.model)
    require_scenes(pipe.dvae.config.size, "name a model of scenes")
    asked = evaluation.sample_pairs(options.split, options.pairs, options.seed)
    settings = evaluation.CompositionSettings(candidates=options.candidates, seed=options.seed, sampler=options.sampler)
    with progress("drawing and judging", len(asked) * options.candidates, unit="drawing") as bar:
        result = evaluation.score_pairs(pipe, asked, settings, progress=bar.advance)
    print(f"{printable(pipe.name)}, {options.split} combinations\n{result.table()}")
    keep(result.save, options.output)
