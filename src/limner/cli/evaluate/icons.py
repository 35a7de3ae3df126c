"""`limner evaluate icons`: accuracy of drawings of subjects in styles unseen for these subjects."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from limner.cli.arguments import check_writable, parse
from limner.cli.evaluate.shared import Seed, write_result
from limner.errors import escape_control
from limner.evaluation.confidence import TEST_SEEDS_FROM
from limner.progress import progress
from limner.sampling.generation_config import CANDIDATES
from limner.validation import Range, Validated

_MIN_ACCURACY = 0.9  # on its training pictures; below, the classifier is unreliable


@dataclass(frozen=True, kw_only=True)
class ScoreIcons(Validated):
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
    classifier: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """Folder of saved classifiers; by default `DATA-classifier`."""
    classifier_steps: Annotated[int, Range(1, 10**7)] = 6_000
    """Training steps of the classifier, 64 pictures each."""
    output: Annotated[Path | None, arg(aliases=("-o",))] = None
    """Write all results as JSON."""


def main(argv: Sequence[str]) -> None:
    """are subjects drawn in styles unseen for them?"""
    options = parse(ScoreIcons, argv, "limner evaluate icons")
    if options.output:
        check_writable(options.output)
    folder = options.classifier and check_writable(options.classifier, folder=True)
    from limner.data.open_source import open_source
    from limner.evaluation import icons as evaluation
    from limner.evaluation.icon_classifier import IconClassifierConfig, train_classifier
    from limner.evaluation.icon_pictures import SPLITS, Icons
    from limner.pipeline import load

    source, pipe = open_source(options.data), load(options.model)
    path = Path(options.data).resolve()
    folder = folder or check_writable(path.parent / f"{path.name}-classifier", folder=True)
    data = Icons.from_source(source, pipe.dvae.config.size)
    labeled, config = data.labeled, IconClassifierConfig(steps=options.classifier_steps)
    with progress("training the classifier", config.steps) as bar:
        classifier = train_classifier(labeled, folder, config, bar)
    accuracy = evaluation.accuracy(classifier, data)
    shares = ", ".join(f"{attribute} {share:.1%}" for attribute, share in accuracy.items())
    print(f"classifier accuracy on its {len(labeled):,} training pictures: {shares}")
    if min(accuracy.values()) < _MIN_ACCURACY:
        advice = f"train it longer (--classifier-steps {2 * options.classifier_steps})"
        warnings.warn(f"the classifier is unreliable even on its training pictures: {advice}", stacklevel=2)
    settings = evaluation.IconSettings(
        captions=options.captions, candidates=options.candidates, repeats=options.repeats, seed=options.seed
    )
    results = []
    evaluations = [(evaluation.evaluate, split, data.references.splits.count(split)) for split in SPLITS]
    kinds = data.pairs.splits
    evaluations += [(evaluation.evaluate_pairs, kind, kinds.count(kind)) for kind in sorted(set(kinds))]
    for evaluate, name, count in evaluations:
        if total := min(count, settings.captions) * settings.repeats * settings.candidates:
            with progress(f"drawing, {escape_control(name)}", total, unit="drawing") as bar:
                results.append(evaluate(pipe, data, classifier, name, settings, bar.advance))
            print(results[-1].table())
    write_result(lambda path: evaluation.save(path, accuracy, results), options.output)
