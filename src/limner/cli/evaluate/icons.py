"""`limner evaluate emoji | icons | glyphs`: drawings of icons against all real ones; `grid` draws a sheet of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from limner.cli.arguments import check_writable
from limner.cli.evaluate.options import DrawGrid, ScoreEmoji, ScoreGlyphs, ScoreIcons
from limner.cli.evaluate.output import Evaluated, write_file
from limner.errors import UserError, escape_control
from limner.progress import Advance, progress

if TYPE_CHECKING:
    from limner.evaluation.icon_classifier import IconClassifier, LabeledIcons
    from limner.evaluation.icon_pictures import Icons
    from limner.evaluation.nearest_neighbor import ReferenceSettings
    from limner.evaluation.result import EvalResult
    from limner.pipeline import TextToImage

_MOSAIC_DRAWINGS, _MOSAIC_COLUMNS = 48, 4
_MIN_ACCURACY = 0.9  # of the classifier of icons on its training pictures; below, it is unreliable


def emoji(options: ScoreEmoji) -> Evaluated:
    """is the nearest real picture the right one?"""
    splits = ("train", "held-out")
    mosaics = _mosaics(options.mosaic, splits)
    from limner.data.open_source import open_source
    from limner.evaluation.nearest_neighbor import ReferenceSet, evaluate
    from limner.pipeline import load

    source, pipe = open_source(options.data), load(options.model)
    references = ReferenceSet.from_source(source, pipe.dvae.config.size)
    if not set(splits) & set(references.splits):
        raise UserError(f"{options.data} lacks readable pictures: inspect it with `limner data show`")

    def results() -> Iterator[EvalResult]:
        for split in splits:
            one = partial(evaluate, pipe, references, split)
            yield from _draw_split(options, split, references.splits, one, mosaics.get(split))

    return Evaluated(model=pipe.name, results=results())


def icons(options: ScoreIcons) -> Evaluated:
    """are subjects drawn in styles unseen for them?"""
    from limner.evaluation import icons as evaluation
    from limner.evaluation.icon_pictures import SPLITS

    mosaics = _mosaics(options.mosaic, SPLITS)
    pipe, data, classifier = _open_icons(options, lambda data: data.labeled)
    accuracy = evaluation.accuracy(classifier, data)
    shares = ", ".join(f"{attribute} {share:.1%}" for attribute, share in accuracy.items())
    print(f"classifier accuracy on its {len(data.labeled):,} training pictures: {shares}")
    if min(accuracy.values()) < _MIN_ACCURACY:
        advice = f"train it longer (--classifier-steps {2 * options.classifier_steps})"
        warnings.warn(f"the classifier is unreliable even on its training pictures: {advice}", stacklevel=2)

    def results() -> Iterator[EvalResult]:
        for name in SPLITS:
            evaluate = partial(evaluation.evaluate, pipe, data, classifier, name)
            yield from _draw_split(options, name, data.references.splits, evaluate, mosaics.get(name))
        for name in sorted(set(data.pairs.splits)):
            evaluate = partial(evaluation.evaluate_pairs, pipe, data, classifier, name)
            yield from _draw_split(options, name, data.pairs.splits, evaluate)

    return Evaluated(model=pipe.name, results=results(), more={"classifier": accuracy})


def glyphs(options: ScoreGlyphs) -> Evaluated:
    """are monochrome icons drawn in styles unseen for them?"""
    from limner.evaluation import glyphs as evaluation
    from limner.evaluation.icon_pictures import SPLITS

    mosaics = _mosaics(options.mosaic, [*SPLITS, "set"])
    pipe, data, classifier = _open_icons(options, evaluation.style_data, varied=False)
    accuracy = evaluation.style_accuracy(classifier, data)
    print(f"classifier accuracy on held-out icons: style {accuracy:.1%} of {len(classifier.styles)}")

    def results() -> Iterator[EvalResult]:
        for split in SPLITS:
            evaluate = partial(evaluation.evaluate, pipe, data, classifier, split)
            times = 2 if split == "combination" and pipe.examples else 1
            yield from _draw_split(options, split, data.references.splits, evaluate, mosaics.get(split), times)
        variants = partial(evaluation.evaluate_variants, pipe, data)
        yield from _draw_split(options, "set", data.references.splits, variants, mosaics.get("set"))

    return Evaluated(model=pipe.name, results=results(), more={"classifier": {"style": accuracy}})


def _mosaics(path: Path | None, splits: Iterable[str]) -> dict[str, Path]:
    """Return the file of each split; none without a path. Raises `UserError` if one cannot be written."""
    return {split: check_writable(path.with_stem(f"{path.stem}-{split}")) for split in splits if path}


def _open_icons(
    options: ScoreIcons, labeled: Callable[[Icons], LabeledIcons], varied: bool = True
) -> tuple[TextToImage, Icons, IconClassifier]:
    """Return the model, the pictures, and a classifier, loaded or trained on those that `labeled` selects."""
    from limner.data.open_source import open_source
    from limner.evaluation.icon_classifier import IconClassifierConfig, train_classifier
    from limner.evaluation.icon_pictures import Icons
    from limner.pipeline import load

    source, pipe, path = open_source(options.data), load(options.model), Path(options.data).resolve()
    folder = options.classifier or check_writable(path.parent / f"{path.name}-classifier", "folder")
    data = Icons.from_source(source, pipe.dvae.config.size)
    chosen, config = labeled(data), IconClassifierConfig(steps=options.classifier_steps, varied=varied)
    with progress("training the classifier", config.steps) as bar:
        return pipe, data, train_classifier(chosen, folder, config, bar)


def _draw_split(
    options: ScoreEmoji | ScoreIcons,
    split: str,
    splits: Sequence[str],
    evaluate: Callable[[ReferenceSettings, Advance], list[EvalResult]],
    mosaic: Path | None = None,
    times: int = 1,
) -> Iterator[EvalResult]:
    """Evaluate a split, whose captions are drawn `times`, unless `splits`, those of all pictures, lack it. Then write
    the drawings of the result that has some to `mosaic`: a full disk must not lose the tables."""
    from limner.evaluation.nearest_neighbor import ReferenceSettings
    from limner.evaluation.report import contact_sheet, save_png

    settings = ReferenceSettings(
        captions=options.captions, candidates=options.candidates, repeats=options.repeats, seed=options.seed
    )
    total = min(splits.count(split), settings.captions) * settings.repeats * settings.candidates * times
    if not total:
        return
    with progress(f"drawing, {escape_control(split)}", total, unit="drawing") as bar:
        results = evaluate(settings, bar.advance)
    for result in results:
        yield result
        if mosaic and result.sheet:
            sheet = contact_sheet(result.sheet[:_MOSAIC_DRAWINGS], columns=_MOSAIC_COLUMNS)
            write_file(mosaic, partial(save_png, sheet))


def grid(options: DrawGrid) -> None:
    """draw a sheet of icons: subjects down, styles across"""
    from limner.data.open_source import open_source
    from limner.evaluation.icon_pictures import Icons, draw_cells, grid_cells, render_grid
    from limner.evaluation.report import save_png
    from limner.pipeline import load

    source, pipe = open_source(options.data), load(options.model)
    data = Icons.from_source(source, pipe.dvae.config.size)
    cells = grid_cells(data, options.subjects)
    with progress("drawing", len(cells) * options.candidates, unit="drawing") as bar:
        drawings = draw_cells(pipe, data, cells, options.candidates, options.seed, bar.advance)
    write_file(options.output, partial(save_png, render_grid(data, cells, drawings, options.real)))
