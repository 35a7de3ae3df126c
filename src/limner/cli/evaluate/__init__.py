"""`limner evaluate composition | pairs | reconstruction | zero-shot | emoji | icons | glyphs | grid`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from limner.cli import run_subcommand
from limner.cli.arguments import check_writable
from limner.cli.evaluate.options import (
    DrawGrid,
    ScoreComposition,
    ScoreEmoji,
    ScoreGlyphs,
    ScoreIcons,
    ScorePairs,
    ScoreReconstruction,
    ScoreZeroShot,
)  # fmt: skip
from limner.errors import UserError, escape_control
from limner.progress import clock, progress

if TYPE_CHECKING:
    from limner.evaluation.icon_classifier import IconClassifier, LabeledIcons
    from limner.evaluation.icon_pictures import Icons
    from limner.pipeline import TextToImage
    from limner.sampling.engine import Candidates

_MOSAIC_CAPTIONS, _MOSAIC_DRAWINGS = 8, 48
_Part = tuple[str, int, Callable[..., Any]]  # name of a part of icon data, its number of captions, and its evaluation
_MIN_ACCURACY = 0.9  # of the classifier of icons on its training pictures; below, it is unreliable


def main(argv: Sequence[str]) -> None:
    """Run a subcommand of `limner evaluate`."""
    commands = (composition, pairs, reconstruction, zero_shot, emoji, icons, glyphs, grid)
    run_subcommand("limner evaluate", commands, argv)


def composition(options: ScoreComposition) -> None:
    """do drawings of scenes show what their captions say?"""
    if not options.objects:
        raise UserError("--objects needs at least one number from 1 to 4")
    from limner.evaluation.composition import CompositionSettings, sample_captions, score
    from limner.evaluation.report import save_png
    from limner.evaluation.scene_sheet import render_samples, scene_samples

    pipe = _load_scene_model(options.model)
    captions = sample_captions(options.split, options.objects, options.captions, options.seed)
    settings = CompositionSettings(candidates=options.candidates, seed=options.seed, sampler=options.sampler)
    start_time, pictures = time.monotonic(), []

    def keep_first(start: int, candidates: Candidates) -> None:
        pictures.extend(candidates.pictures[: max(0, _MOSAIC_CAPTIONS - start)])

    with progress("drawing and checking", len(captions) * options.candidates, unit="drawing") as bar:
        result = score(pipe, captions, settings, progress=bar.advance, on_candidates=keep_first)
    elapsed = clock(time.monotonic() - start_time)
    print(f"{escape_control(pipe.name)}, {options.split} combinations, {elapsed}\n{result.table()}")
    if options.mosaic:
        _write(options.mosaic, partial(save_png, render_samples(scene_samples(captions, pictures, result))))
    _write(options.output, result.save)


def pairs(options: ScorePairs) -> None:
    """given the upper half, does the lower half match the caption?"""
    from limner.evaluation.composition import CompositionSettings, sample_pairs, score_pairs

    pipe = _load_scene_model(options.model)
    samples = sample_pairs(options.split, options.pairs, options.seed)
    settings = CompositionSettings(candidates=options.candidates, seed=options.seed, sampler=options.sampler)
    with progress("drawing and checking", len(samples) * options.candidates, unit="drawing") as bar:
        result = score_pairs(pipe, samples, settings, progress=bar.advance)
    print(f"{escape_control(pipe.name)}, {options.split} combinations\n{result.table()}")
    _write(options.output, result.save)


def reconstruction(options: ScoreReconstruction) -> None:
    """how well does the dVAE reconstruct unseen pictures?"""
    import numpy as np

    from limner.data.datasets import ImageCaptionDataset
    from limner.data.open_source import open_source
    from limner.evaluation.reconstruction import fresh_scenes, measure
    from limner.evaluation.result import save
    from limner.pipeline import load

    pipe = load(options.model)
    size = pipe.dvae.config.size
    if options.data is None:
        _require_scenes(size, "add --data")
        split = None if options.split == "both" else options.split
        pictures = fresh_scenes(options.count, options.seed, split, size)
    else:
        source = open_source(options.data, split="held-out")
        indices = np.linspace(0, len(source) - 1, min(len(source), options.count)).astype(int)
        pictures = ImageCaptionDataset(source, size).load(indices)[1]
        if not len(pictures):
            raise UserError(f"{options.data} lacks readable held-out pictures: inspect it with `limner data show`")
    with progress("reconstructing", len(pictures), unit="picture") as bar:
        result = measure(pipe.dvae, pictures, check_scenes=options.data is None, progress=bar.advance)
    print(f"{escape_control(pipe.name)}\n{result.table()}")
    _write(options.output, lambda path: save(path, [result], model=pipe.name))


def zero_shot(options: ScoreZeroShot) -> None:
    """does the contrastive model recognize classes by name?"""
    from limner.data.open_source import open_source
    from limner.evaluation.result import save
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
    _write(options.output, lambda path: save(path, [result], model=name))


def emoji(options: ScoreEmoji) -> None:
    """is the nearest real picture the right one?"""
    splits, mosaic = ("train", "held-out"), options.mosaic
    mosaics = {split: check_writable(mosaic.with_stem(f"{mosaic.stem}-{split}")) for split in splits if mosaic}
    from limner.data.open_source import open_source
    from limner.evaluation.nearest_neighbor import ReferenceSet, evaluate
    from limner.evaluation.report import contact_sheet, save_png
    from limner.evaluation.result import save
    from limner.pipeline import load

    source, pipe = open_source(options.data), load(options.model)
    references = ReferenceSet.from_source(source, pipe.dvae.config.size)
    results = []
    for split in splits:
        total = len(references.split_indices(split, options.captions, options.seed)) * options.repeats
        if total == 0:
            continue
        with progress(f"drawing, {split}", total, unit="drawing") as bar:
            result = evaluate(
                pipe, references, split, n=options.captions, candidates=options.candidates, repeats=options.repeats,
                seed=options.seed, progress=bar.advance,
            )  # fmt: skip
        results.append(result)
        print(result.table())
        if mosaic:
            sheet = contact_sheet(result.sheet[:_MOSAIC_DRAWINGS], columns=_MOSAIC_CAPTIONS // 2)
            _write(mosaics[split], partial(save_png, sheet))
    if not results:
        raise UserError(f"{options.data} lacks readable pictures: inspect it with `limner data show`")
    _write(options.output, lambda path: save(path, results, model=pipe.name))


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
    kinds = data.pairs.splits
    parts: list[_Part] = [(split, data.references.splits.count(split), evaluation.evaluate) for split in SPLITS]
    parts += [(kind, kinds.count(kind), evaluation.evaluate_pairs) for kind in sorted(set(kinds))]
    _score_icons(options, pipe, data, classifier, accuracy, parts)


def glyphs(options: ScoreGlyphs) -> None:
    """are monochrome icons drawn in styles unseen for them?"""
    from limner.evaluation import glyphs as evaluation
    from limner.evaluation.icon_pictures import SPLITS

    pipe, data, classifier = _open_icons(options, evaluation.style_data)
    accuracy = evaluation.style_accuracy(classifier, data)
    print(f"classifier accuracy on held-out icons: style {accuracy:.1%} of {len(classifier.styles)}")
    parts = [(split, data.references.splits.count(split), evaluation.evaluate) for split in SPLITS]
    _score_icons(options, pipe, data, classifier, {"style": accuracy}, parts)


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


def _score_icons(
    options: ScoreIcons, pipe: TextToImage, data: Icons, classifier: IconClassifier,
    accuracy: dict[str, float], parts: Sequence[_Part],
) -> None:  # fmt: skip
    """Draw and score the captions of each part of the data that has any; print and write the results."""
    from limner.evaluation.icons import IconSettings
    from limner.evaluation.result import EvalResult, save

    settings = IconSettings(**{key: getattr(options, key) for key in ("captions", "candidates", "repeats", "seed")})
    results: list[EvalResult] = []
    for name, count, evaluate in parts:
        if total := min(count, settings.captions) * settings.repeats * settings.candidates:
            with progress(f"drawing, {escape_control(name)}", total, unit="drawing") as bar:
                scored = evaluate(pipe, data, classifier, name, settings, bar.advance)
            scored = [scored] if isinstance(scored, EvalResult) else scored
            print("\n".join(result.table() for result in scored))
            results += scored
    _write(options.output, lambda path: save(path, results, model=pipe.name, classifier=accuracy))


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
    _write(options.output, partial(save_png, render_grid(data, cells, drawings, options.real)))


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


def _write(path: Path | None, save: Callable[[Path], object]) -> None:
    """Call `save` with the path and print the path; do nothing without a path."""
    if path:
        save(path)
        print(f"written: {escape_control(path)}")
