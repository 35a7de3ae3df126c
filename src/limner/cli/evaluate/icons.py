"""`limner evaluate icons`: accuracy of drawings of subjects in styles unseen for these subjects."""

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

_SURE = 0.9  # accuracy on its training pictures below which the classifier is unreliable


@dataclass(frozen=True, kw_only=True)
class ScoreIcons(Checked):
    """Draw subjects in styles held out of training, and classify subject and style of the drawings. Held-out pairs are
    drawn with their upper half given.

    The first call trains the classifier on all real pictures and saves it. Intervals are 95%, over subjects.
    """

    model: Positional[str]
    """Name of a bundled model, or a folder."""
    data: Positional[str]
    """A data set of `limner data icons`."""
    captions: Annotated[int, Range(1, 10**6)] = 256
    """Captions per split, and pairs per kind, chosen at random."""
    candidates: Annotated[int, CANDIDATES] = 16
    """Candidates per caption; the contrastive model ranks them, for pairs the likelihood under the prior does."""
    repeats: Annotated[int, Range(1, 1_000)] = 1
    """Drawings per caption, each from new candidates."""
    seed: Seed = TEST_SEEDS_FROM
    judge: Path | None = None
    """Folder of saved classifiers; by default `DATA-judge`."""
    judge_steps: Annotated[int, Range(1, 10**7)] = 6_000
    """Training steps of the classifier, 64 pictures each."""
    output: Annotated[Path | None, arg(aliases=("-o",))] = None
    """Write all results as JSON."""


def main(argv: Sequence[str]) -> None:
    """are subjects drawn in styles unseen for them?"""
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
