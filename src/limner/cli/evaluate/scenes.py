"""Commands of `limner evaluate` that evaluate models on new scenes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from limner.cli.evaluate.options import (
    ScoreAll,
    ScoreComposition,
    ScoreDetector,
    ScoreGenEval,
    ScorePairs,
    ScoreReconstruction,
    ScoreZeroShot,
)
from limner.cli.evaluate.output import Evaluated, write_file
from limner.errors import UserError
from limner.progress import progress

if TYPE_CHECKING:
    import numpy as np

    from limner.evaluation.composition import CaptionCase
    from limner.evaluation.geneval import Prompt
    from limner.evaluation.report import SheetRow
    from limner.evaluation.result import EvalResult
    from limner.pipeline import TextToImage
    from limner.tasks.scenes import Scene, ScenePair

_SHEET_CAPTIONS = 8


def composition(options: ScoreComposition) -> Evaluated:
    """do drawings of scenes show what their captions say?"""
    if not options.objects:
        raise UserError("--objects needs at least one number from 1 to 4")
    from limner.evaluation.composition import sample_captions, scene_cases
    from limner.evaluation.report import contact_sheet, save_png

    pipe = _load_scene_model(options.model)
    captions = sample_captions(options.split, options.objects, options.captions, options.seed)

    def results() -> Iterator[EvalResult]:
        scored = _score(pipe, scene_cases(captions), captions, options)
        yield from scored
        if options.mosaic:  # after the tables, which a full disk must not lose
            rows = scored[0].sheet
            write_file(options.mosaic, partial(save_png, contact_sheet(rows, columns=min(4, len(rows)))))

    return Evaluated(model=pipe.name, about=f"{options.split} combinations", results=results())


def pairs(options: ScorePairs) -> Evaluated:
    """given the upper half, does the lower half match the caption?"""
    from limner.evaluation.composition import pair_cases, sample_pairs

    pipe = _load_scene_model(options.model)
    samples = sample_pairs(options.split, options.pairs, options.seed)
    results = _score(pipe, pair_cases(pipe, samples), samples, options)
    return Evaluated(model=pipe.name, about=f"{options.split} combinations", results=results)


def _score(
    pipe: TextToImage,
    cases: Sequence[CaptionCase],
    originals: Sequence[tuple[str, Scene | ScenePair]],
    options: ScoreComposition | ScorePairs,
) -> list[EvalResult]:
    """Draw and check all cases. The first result has drawings of the first captions next to the originals."""
    from limner.evaluation.composition import CompositionSettings, score
    from limner.evaluation.scene_sheet import SceneSample

    settings = CompositionSettings(candidates=options.candidates, seed=options.seed, sampler=options.sampler)
    rows: list[SheetRow] = []

    def keep_first(i: int, *drawn: Any) -> None:
        if i < _SHEET_CAPTIONS:
            rows.append(SceneSample(*originals[i], *drawn).sheet_row())

    with progress("drawing and checking", len(cases) * options.candidates, unit="drawing") as bar:
        first, *others = score(pipe, cases, settings, progress=bar.advance, on_drawn=keep_first)
    return [replace(first, sheet=rows), *others]


def geneval(options: ScoreGenEval) -> Evaluated:
    """GenEval's tasks: objects, counting, colors, position, attribute binding"""
    from limner.evaluation.geneval import evaluate, read_scenes, sample_prompts

    if options.data or options.detector:
        pipe, prompts, read = _open_geneval_icons(options)
    else:
        pipe, read = _load_scene_model(options.model), read_scenes
        prompts = sample_prompts(options.prompts, options.seed, options.split)
    with progress("drawing and checking", len(prompts) * options.candidates, unit="drawing") as bar:
        result = evaluate(
            pipe, prompts, read, candidates=options.candidates, seed=options.seed, sampler=options.sampler,
            folder=options.folder, progress=bar.advance,
        )  # fmt: skip
    return Evaluated(model=pipe.name, about=f"{options.split} combinations", results=[result])


def _open_geneval_icons(
    options: ScoreGenEval,
) -> tuple[TextToImage, list[Prompt], Callable[[np.ndarray], list[Sequence[Any]]]]:
    """Return a model of icons, its prompts, and the detector that reads its drawings. Raises `UserError`."""
    from limner.data.open_source import open_source
    from limner.evaluation.detection import load_detector
    from limner.evaluation.geneval import icon_prompts, is_right, read_icons
    from limner.evaluation.icon_pictures import Icons
    from limner.pipeline import load

    if not options.data or not options.detector:
        raise UserError("drawings of icons need --data and --detector: name the data set and a detector trained on it")
    detector, pipe = load_detector(options.detector), load(options.model)
    icons = Icons.from_source(open_source(options.data), pipe.dvae.config.size)
    prompts, real = icon_prompts(icons, options.prompts, options.seed, options.split)
    if not prompts:
        raise UserError(f"{options.data} lacks icons of the split {options.split}: choose the other --split")
    if unknown := {str(prompt.include[0]["class"]) for prompt in prompts} - {*detector.classes}:
        raise UserError(f"the detector does not know {min(unknown)!r}: train it with `limner detector {options.data}`")
    read = partial(read_icons, detector)
    right = sum(is_right(prompt, objects) for prompt, objects in zip(prompts, read(real), strict=True))
    print(f"the detector finds the subject in {right / len(prompts):.1%} of these {len(prompts):,} icons themselves")
    return pipe, prompts, read


def reconstruction(options: ScoreReconstruction) -> Evaluated:
    """how well does the dVAE reconstruct unseen pictures?"""
    import numpy as np

    from limner.data.datasets import ImageCaptionDataset
    from limner.data.open_source import open_source
    from limner.evaluation.reconstruction import confusions, fresh_scenes, measure, single_objects
    from limner.pipeline import load

    pipe = load(options.model)
    size, singles = pipe.dvae.config.size, []
    if options.data is None:
        _require_scenes(size, "add --data")
        singles = single_objects(options.seed, most=3 * options.count)
        pictures = fresh_scenes(options.count, options.seed, None if options.split == "both" else options.split, size)
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
    return Evaluated(model=pipe.name, results=results)


def zero_shot(options: ScoreZeroShot) -> Evaluated:
    """does the contrastive model recognize classes by name?"""
    from limner.data.class_folders import ClassFolders
    from limner.data.open_source import FolderSource, open_source
    from limner.evaluation import zero_shot as evaluation
    from limner.runs.stages import load_reranker

    reranker, prompts = load_reranker(options.model), options.prompts and evaluation.read_prompts(options.prompts)
    size = reranker.model.config.size
    if options.data is None:
        if options.classes:
            raise UserError("--classes names the classes of a data set: add --data")
        _require_scenes(size, "add --data")
        prompts = prompts or evaluation.SCENE_PROMPTS
        task = evaluation.scene_task(options.count, size, options.split, options.seed, prompts)
    else:
        classes = options.classes and evaluation.read_classes(options.classes)
        source, default = open_source(options.data), evaluation.EMOJI_PROMPTS
        if isinstance(source, FolderSource) and not source.captioned:
            source, default = ClassFolders(Path(options.data)), evaluation.read_prompts(evaluation.IMAGENET_PROMPTS)
        task = evaluation.dataset_task(
            source, size, options.split, options.count, options.seed, prompts=prompts or default, classes=classes,
            augment=reranker.augment,
        )  # fmt: skip
    total = len(task.names) * len(task.prompts) + task.count
    with progress("classifying prompts and pictures", total, unit="text or picture") as bar:
        result = evaluation.evaluate(reranker, task, bar.advance)
    return Evaluated(model=reranker.name, about=options.split, results=[result])


def detector(options: ScoreDetector) -> Evaluated:
    """does a detector find the objects, also in drawings?"""
    from limner.evaluation.detection import agreement, evaluate, labeled_pictures, load_detector

    trained = load_detector(options.model)
    pictures, title = labeled_pictures(trained, options.data, options.count, options.seed, options.split)
    with progress("detecting", unit="picture") as bar:
        results = [evaluate(trained, pictures, title, bar.advance)]
    if options.drawings:
        pipe = _load_scene_model(options.drawings)
        with progress("drawing and checking", options.captions, unit="drawing") as bar:
            results.append(agreement(trained, pipe, options.captions, options.seed, options.split, bar.advance))
    return Evaluated(model=options.model, results=results)


def scene_evaluations(options: ScoreAll) -> dict[str, Callable[[], Evaluated]]:
    """Return the evaluations on new scenes by name."""
    common = {"model": options.model, "seed": options.seed}
    drawn = {**common, "candidates": options.candidates}
    return {
        "composition": lambda: composition(ScoreComposition(**drawn, captions=options.captions)),
        "pairs": lambda: pairs(ScorePairs(**drawn, pairs=math.ceil(options.captions / 4))),
        "reconstruction": lambda: reconstruction(ScoreReconstruction(**common, count=options.captions)),
        "zero-shot": lambda: zero_shot(ScoreZeroShot(**common, count=options.captions)),
    }


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
