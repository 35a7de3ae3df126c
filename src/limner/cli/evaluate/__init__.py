"""`limner evaluate`: a function for each evaluation of a model; `from_files.py` reads results instead."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from limner.cli import run_subcommand
from limner.cli.arguments import check_writable
from limner.cli.evaluate.fidelity import fidelity
from limner.cli.evaluate.from_files import compare, votes
from limner.cli.evaluate.options import (
    DrawGrid,
    ScoreComposition,
    ScoreDetector,
    ScoreEmoji,
    ScoreGlyphs,
    ScoreIcons,
    ScorePairs,
    ScoreReconstruction,
    ScoreZeroShot,
)  # fmt: skip
from limner.cli.evaluate.output import write_file, write_results
from limner.errors import UserError, escape_control
from limner.progress import Advance, clock, progress

if TYPE_CHECKING:
    from limner.evaluation.icon_classifier import IconClassifier, LabeledIcons
    from limner.evaluation.icon_pictures import Icons
    from limner.evaluation.nearest_neighbor import ReferenceSettings
    from limner.evaluation.result import EvalResult
    from limner.pipeline import TextToImage

_MOSAIC_CAPTIONS, _MOSAIC_DRAWINGS = 8, 48
_MIN_ACCURACY = 0.9  # of the classifier of icons on its training pictures; below, it is unreliable


def main(argv: Sequence[str]) -> None:
    """Run a subcommand of `limner evaluate`."""
    commands = (
        composition, pairs, fidelity, reconstruction, zero_shot, emoji, icons, glyphs, detector, grid, votes, compare,
    )  # fmt: skip
    run_subcommand("limner evaluate", commands, argv)


def composition(options: ScoreComposition) -> None:
    """do drawings of scenes show what their captions say?"""
    if not options.objects:
        raise UserError("--objects needs at least one number from 1 to 4")
    from limner.evaluation.composition import CompositionSettings, sample_captions, scene_cases, score
    from limner.evaluation.report import save_png
    from limner.evaluation.result import tables
    from limner.evaluation.scene_sheet import SceneSample, render_samples

    pipe = _load_scene_model(options.model)
    captions = sample_captions(options.split, options.objects, options.captions, options.seed)
    settings = CompositionSettings(candidates=options.candidates, seed=options.seed, sampler=options.sampler)
    start_time, samples = time.monotonic(), list[SceneSample]()

    def keep_first(i: int, *drawn: Any) -> None:
        if i < _MOSAIC_CAPTIONS:
            samples.append(SceneSample(*captions[i], *drawn))

    with progress("drawing and checking", len(captions) * options.candidates, unit="drawing") as bar:
        results = score(pipe, scene_cases(captions), settings, progress=bar.advance, on_drawn=keep_first)
    elapsed = clock(time.monotonic() - start_time)
    print(f"{escape_control(pipe.name)}, {options.split} combinations, {elapsed}\n{tables(results)}")
    if options.mosaic:
        write_file(options.mosaic, partial(save_png, render_samples(samples)))
    write_results(options, results, model=pipe.name)


def pairs(options: ScorePairs) -> None:
    """given the upper half, does the lower half match the caption?"""
    from limner.evaluation.composition import CompositionSettings, pair_cases, sample_pairs, score
    from limner.evaluation.result import tables

    pipe = _load_scene_model(options.model)
    samples = sample_pairs(options.split, options.pairs, options.seed)
    settings = CompositionSettings(candidates=options.candidates, seed=options.seed, sampler=options.sampler)
    with progress("drawing and checking", len(samples) * options.candidates, unit="drawing") as bar:
        results = score(pipe, pair_cases(pipe, samples), settings, progress=bar.advance)
    print(f"{escape_control(pipe.name)}, {options.split} combinations\n{tables(results)}")
    write_results(options, results, model=pipe.name)


def reconstruction(options: ScoreReconstruction) -> None:
    """how well does the dVAE reconstruct unseen pictures?"""
    import numpy as np

    from limner.data.datasets import ImageCaptionDataset
    from limner.data.open_source import open_source
    from limner.evaluation.reconstruction import confusions, fresh_scenes, measure, single_objects
    from limner.evaluation.result import tables
    from limner.pipeline import load

    pipe = load(options.model)
    size, singles = pipe.dvae.config.size, []
    if options.data is None:
        _require_scenes(size, "add --data")
        singles = single_objects(options.seed)
        split = None if options.split == "both" else options.split
        pictures = fresh_scenes(options.count, options.seed, split, size)
    else:
        source = open_source(options.data, split="held-out")
        indices = np.linspace(0, len(source) - 1, min(len(source), options.count)).astype(int)
        pictures = ImageCaptionDataset(source, size).load(indices)[1]
        if not len(pictures):
            raise UserError(f"{options.data} lacks readable held-out pictures: inspect it with `limner data show`")
    with progress("reconstructing", len(pictures) + len(singles), unit="picture") as bar:
        results = [measure(pipe.dvae, pictures, check_scenes=options.data is None, progress=bar.advance)]
        if singles:
            results.append(confusions(pipe.dvae, singles, bar.advance))
    print(f"{escape_control(pipe.name)}\n{tables(results)}")
    write_results(options, results, model=pipe.name)


def zero_shot(options: ScoreZeroShot) -> None:
    """does the contrastive model recognize classes by name?"""
    from limner.data.open_source import open_source
    from limner.evaluation.zero_shot import dataset_task, evaluate, scene_task
    from limner.runs.stages import load_reranker

    model, tokenizer, name = load_reranker(options.model)
    size = model.config.size
    if options.data is None:
        _require_scenes(size, "add --data")
        task = scene_task(options.count, size, options.split, options.seed)
    else:
        task = dataset_task(open_source(options.data), size, options.split, options.count, options.seed)
    total = len(task.names) * len(task.prompts) + len(task.labels)
    with progress("classifying prompts and pictures", total, unit="text or picture") as bar:
        result = evaluate(model, tokenizer, task, bar.advance)
    print(f"{escape_control(name)}, {options.split}\n{result.table()}")
    write_results(options, [result], model=name)


def emoji(options: ScoreEmoji) -> None:
    """is the nearest real picture the right one?"""
    splits, mosaic = ("train", "held-out"), options.mosaic
    mosaics = {split: check_writable(mosaic.with_stem(f"{mosaic.stem}-{split}")) for split in splits if mosaic}
    from limner.data.open_source import open_source
    from limner.evaluation.nearest_neighbor import ReferenceSet, evaluate
    from limner.evaluation.report import contact_sheet, save_png
    from limner.pipeline import load

    source, pipe = open_source(options.data), load(options.model)
    references = ReferenceSet.from_source(source, pipe.dvae.config.size)
    results = []
    for split in ("train", "held-out"):
        for result in _draw_split(options, split, references.splits, partial(evaluate, pipe, references, split)):
            results.append(result)
            if options.mosaic:
                sheet = contact_sheet(result.sheet[:_MOSAIC_DRAWINGS], columns=_MOSAIC_CAPTIONS // 2)
                write_file(mosaics[split], partial(save_png, sheet))
    if not results:
        raise UserError(f"{options.data} lacks readable pictures: inspect it with `limner data show`")
    write_results(options, results, model=pipe.name)


def icons(options: ScoreIcons) -> None:
    """are subjects drawn in styles unseen for them?"""
    from limner.evaluation import icons as evaluation
    from limner.evaluation.icon_pictures import SPLITS

    pipe, data, classifier = _open_icons(options, lambda data: data.labeled)
    accuracy = evaluation.accuracy(classifier, data)
    shares = ", ".join(f"{attribute} {share:.1%}" for attribute, share in accuracy.items())
    print(f"classifier accuracy on its {len(data.labeled):,} training pictures: {shares}")
    if min(accuracy.values()) < _MIN_ACCURACY:
        advice = f"train it longer (--classifier-steps {2 * options.classifier_steps})"
        warnings.warn(f"the classifier is unreliable even on its training pictures: {advice}", stacklevel=2)
    results = []
    for name in SPLITS:
        evaluate = partial(evaluation.evaluate, pipe, data, classifier, name)
        results += _draw_split(options, name, data.references.splits, evaluate)
    for name in sorted(set(data.pairs.splits)):
        evaluate = partial(evaluation.evaluate_pairs, pipe, data, classifier, name)
        results += _draw_split(options, name, data.pairs.splits, evaluate)
    write_results(options, results, model=pipe.name, classifier=accuracy)


def glyphs(options: ScoreGlyphs) -> None:
    """are monochrome icons drawn in styles unseen for them?"""
    from limner.evaluation import glyphs as evaluation
    from limner.evaluation.icon_pictures import SPLITS

    pipe, data, classifier = _open_icons(options, evaluation.style_data)
    accuracy = evaluation.style_accuracy(classifier, data)
    print(f"classifier accuracy on held-out icons: style {accuracy:.1%} of {len(classifier.styles)}")
    results = []
    for split in SPLITS:
        evaluate = partial(evaluation.evaluate, pipe, data, classifier, split)
        results += _draw_split(options, split, data.references.splits, evaluate)
    write_results(options, results, model=pipe.name, classifier={"style": accuracy})


def _open_icons(
    options: ScoreIcons, labeled: Callable[[Icons], LabeledIcons]
) -> tuple[TextToImage, Icons, IconClassifier]:
    """Return the model, the pictures, and a classifier, loaded or trained on those that `labeled` selects."""
    from limner.data.open_source import open_source
    from limner.evaluation.icon_classifier import IconClassifierConfig, train_classifier
    from limner.evaluation.icon_pictures import Icons
    from limner.pipeline import load

    source, pipe, path = open_source(options.data), load(options.model), Path(options.data).resolve()
    folder = options.classifier or check_writable(path.parent / f"{path.name}-classifier", "folder")
    data, config = (
        Icons.from_source(source, pipe.dvae.config.size),
        IconClassifierConfig(steps=options.classifier_steps),
    )
    chosen = labeled(data)
    with progress("training the classifier", config.steps) as bar:
        return pipe, data, train_classifier(chosen, folder, config, bar)


def _draw_split(
    options: ScoreEmoji | ScoreIcons,
    split: str,
    splits: Sequence[str],
    evaluate: Callable[[ReferenceSettings, Advance], list[EvalResult]],
) -> list[EvalResult]:
    """Evaluate a split of `splits`, those of all pictures, and print the tables. A split without pictures has none."""
    from limner.evaluation.nearest_neighbor import ReferenceSettings
    from limner.evaluation.result import tables

    settings = ReferenceSettings(
        captions=options.captions, candidates=options.candidates, repeats=options.repeats, seed=options.seed
    )
    total = min(splits.count(split), settings.captions) * settings.repeats * settings.candidates
    if not total:
        return []
    with progress(f"drawing, {escape_control(split)}", total, unit="drawing") as bar:
        results = evaluate(settings, bar.advance)
    print(tables(results))
    return results


def detector(options: ScoreDetector) -> None:
    """does a detector find the objects, also in drawings?"""
    from limner.evaluation.detection import agreement, evaluate, labeled_pictures, load_detector
    from limner.evaluation.result import tables

    trained = load_detector(options.model)
    pictures, title = labeled_pictures(trained, options.data, options.count, options.seed, options.split)
    with progress("detecting", unit="picture") as bar:
        results = [evaluate(trained, pictures, title, bar.advance)]
    if options.drawings:
        pipe = _load_scene_model(options.drawings)
        with progress("drawing and checking", options.captions, unit="drawing") as bar:
            results.append(agreement(trained, pipe, options.captions, options.seed, options.split, bar.advance))
    print(tables(results))
    write_results(options, results, model=options.model)


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


def _load_scene_model(name: str) -> TextToImage:
    from limner.pipeline import load

    pipe = load(name)
    _require_scenes(pipe.dvae.config.size, "name a model of scenes")
    return pipe


def _require_scenes(size: int, advice: str) -> None:
    """Raise `UserError` if pictures of `size` pixels per side cannot be scenes; `advice` ends the message."""
    from limner.tasks.scenes import UNITS

    if size % UNITS:
        raise UserError(f"the size of scenes is a multiple of {UNITS} pixels, this model draws {size} pixels: {advice}")
