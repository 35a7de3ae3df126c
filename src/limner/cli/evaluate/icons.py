"""`limner evaluate icons`: whether subjects are drawn in styles in which they were never seen."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from limner.cli.arguments import parse, place
from limner.cli.evaluate.shared import Seed, keep
from limner.errors import printable
from limner.evaluation.confidence import TEST_SEEDS_FROM
from limner.progress import progress
from limner.sampling.generation_config import CANDIDATES
from limner.validation import Checked, Range

_SURE = 0.9  # of the pictures that a judge has seen, if its verdicts are to mean something


@dataclass(frozen=True, kw_only=True)
class ScoreIcons(Checked):
    """Draw subjects in styles that were held out of training, and have a classifier, the judge, read subject and style
    of the drawings. Held-out pairs are drawn with their upper half given.

    The judge is trained on all real pictures the first time, and kept. Intervals are 95% and over subjects.
    """

    model: Positional[str]
    """A bundled model by name, or a folder."""
    data: Positional[str]
    """The data set that `limner data icons` wrote."""
    captions: Annotated[int, Range(1, 10**6)] = 256
    """Captions of each split, and pairs of each kind, chosen at random."""
    candidates: Annotated[int, CANDIDATES] = 16
    """How many are drawn of each; the contrastive model chooses among them, of pairs the prior by likelihood."""
    repeats: Annotated[int, Range(1, 1_000)] = 1
    """How many times each caption is drawn, each time with so many candidates."""
    seed: Seed = TEST_SEEDS_FROM
    judge: Path | None = None
    """The folder where judges are kept; by default DATA-judge."""
    judge_steps: Annotated[int, Range(1, 10**7)] = 6_000
    """Of the judge's training, 64 pictures each."""
    output: Annotated[Path | None, arg(aliases=("-o",))] = None
    """Write all results as JSON."""


def main(argv: Sequence[str]) -> None:
    """are subjects drawn in styles that they were never seen in?"""
    options = parse(ScoreIcons, argv, "limner evaluate icons")
    if options.output:
        place(options.output)
    kept = options.judge and place(options.judge, folder=True)
    from limner.data.open_source import open_source
    from limner.evaluation import icons as evaluation
    from limner.evaluation.icon_classifier import IconClassifierConfig, train_classifier
    from limner.evaluation.icon_pictures import SPLITS, Icons
    from limner.evaluation.icon_result import save
    from limner.pipeline import load

    source, pipe = open_source(options.data), load(options.model)
    there = Path(options.data).resolve()
    kept = kept or place(there.parent / f"{there.name}-judge", folder=True)
    data = Icons.from_source(source, pipe.dvae.config.size)
    labelled, config = data.labeled, IconClassifierConfig(steps=options.judge_steps)
    with progress("the judge", config.steps) as bar:
        judge = train_classifier(labelled, kept, config, bar)
    accuracy = evaluation.accuracy(judge, data)
    told = ", ".join(f"{respect} of {share:.1%}" for respect, share in accuracy.items())
    print(f"the judge reads of the {len(labelled):,} real pictures, on which it was trained: {told}")
    if min(accuracy.values()) < _SURE:
        advice = f"its verdicts mean little; train it longer (--judge-steps {2 * options.judge_steps})"
        warnings.warn(f"the judge does not know its own pictures: {advice}", stacklevel=2)
    settings = evaluation.IconSettings(
        captions=options.captions, candidates=options.candidates, repeats=options.repeats, seed=options.seed
    )
    results = []
    asked = [(evaluation.evaluate, split, data.references.splits.count(split)) for split in SPLITS]
    asked += [(evaluation.evaluate_pairs, kind, data.pairs.kinds.count(kind)) for kind in sorted(set(data.pairs.kinds))]
    for evaluate, what, count in asked:
        if total := min(count, settings.captions) * settings.repeats * settings.candidates:
            with progress(f"drawing, {printable(what)}", total, unit="drawing") as bar:
                results.append(evaluate(pipe, data, judge, what, settings, bar.advance))
            print(results[-1].table())
    keep(lambda path: save(path, accuracy, results), options.output)
