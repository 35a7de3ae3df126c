"""`limner evaluate composition | pairs | reconstruction | zero-shot | emoji | icons | grid`: measure a trained model.

The defaults are those of published figures: many captions, and seeds from 1,000 on, on which nothing was chosen. To
choose between models or settings, give a seed below 1,000.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from limner.cli import dispatch
from limner.cli.arguments import parse, place
from limner.errors import UserError, printable
from limner.progress import clock, progress
from limner.ranges import SEEDS, Checked, Range
from limner.sampling.options import CANDIDATES, Sampler

if TYPE_CHECKING:
    from limner.evaluation.composition import CompositionSettings

CHOOSE = "Choose between models on seeds below 1,000, publish from 1,000 on."
Seed = Annotated[int, SEEDS, arg(help=f"Of the captions and their drawings. {CHOOSE}")]


@dataclass(frozen=True, kw_only=True)
class ScoreComposition(Checked):
    """Draw captions of the scenes world and let the oracle judge whether everything in them is right.

    Intervals are 95% and over combinations of size, fill, color, shape and background: 30 are held out, which the
    captions share. The gain of more candidates is computed caption by caption, with its interval.
    """

    model: Positional[str] = "scenes"
    """A bundled model by name, or a folder."""
    split: Literal["held-out", "train"] = "held-out"
    """Captions with combinations kept out of training, or of the training kind."""
    captions: Annotated[int, Range(1, 10**6)] = 1_024
    things: Annotated[tuple[int, ...], Range(1, 4)] = (1, 2)
    """Numbers of things in a scene, taken in turn."""
    candidates: Annotated[int, CANDIDATES] = 64
    seed: Seed = 1_000
    sampler: Annotated[Sampler, arg(name="")] = Sampler()
    output: Annotated[Path | None, arg(aliases=("-o",))] = None
    """Write all results as JSON."""


@dataclass(frozen=True, kw_only=True)
class ScorePairs(Checked):
    """Give the upper half of a pair ("the exact same scene on the top as a sketch at the bottom") and let the
    oracle judge the lower half that is drawn. Intervals are 95% and over combinations, as of `composition`."""

    model: Positional[str] = "scenes"
    """A bundled model by name, or a folder."""
    split: Literal["held-out", "train"] = "held-out"
    """Pairs with combinations kept out of training, or of the training kind."""
    pairs: Annotated[int, Range(1, 10**6)] = 1_024
    candidates: Annotated[int, CANDIDATES] = 16
    seed: Seed = 1_000
    sampler: Annotated[Sampler, arg(name="")] = Sampler()
    output: Annotated[Path | None, arg(aliases=("-o",))] = None
    """Write all results as JSON."""


@dataclass(frozen=True, kw_only=True)
class ScoreReconstruction(Checked):
    """Reconstruct unseen pictures with a model's dVAE: PSNR, codes in use, what the oracle reads."""

    model: Positional[str] = "scenes"
    """A bundled model by name, or a folder."""
    data: str | None = None
    """The held-out samples of a data set; without it, fresh scenes that the oracle reads too."""
    split: Literal["both", "train", "held-out"] = "both"
    """Fresh scenes with combinations kept out of training, of the training kind, or both in turn."""
    count: Annotated[int, Range(1, 10**6)] = 1024
    """Pictures at most."""
    seed: Annotated[int, SEEDS, arg(help=f"Of the fresh scenes. {CHOOSE}")] = 1_000
    output: Annotated[Path | None, arg(aliases=("-o",))] = None
    """Write the result as JSON."""


@dataclass(frozen=True, kw_only=True)
class ScoreZeroShot(Checked):
    """Classify pictures with a model's contrastive model and the names of the classes alone."""

    model: Positional[str] = "scenes"
    """A bundled model by name, or a folder."""
    data: str | None = None
    """What `limner data emoji` wrote, whose names are the classes; without it, fresh scenes of one thing."""
    split: Literal["train", "held-out"] = "held-out"
    count: Annotated[int, Range(1, 10**6)] = 1_024
    """Pictures at most."""
    seed: Annotated[int, SEEDS, arg(help=f"Of the pictures. {CHOOSE}")] = 1_000
    output: Annotated[Path | None, arg(aliases=("-o",))] = None
    """Write the result as JSON."""


@dataclass(frozen=True, kw_only=True)
class ScoreEmoji(Checked):
    """Draw captions of a data set of emoji and look for the nearest real one among all of them.

    Intervals are 95% and over families: variants of tone, gender, hair and direction are one.
    """

    model: Positional[str]
    """A folder that `limner train` wrote."""
    data: Positional[str]
    """The data set that `limner data emoji` wrote."""
    captions: Annotated[int, Range(1, 10**6)] = 256
    """Captions of each split, chosen at random."""
    candidates: Annotated[int, CANDIDATES] = 16
    repeats: Annotated[int, Range(1, 1_000)] = 4
    """How many times each caption is drawn, each time with all candidates: the held-out captions are few."""
    seed: Seed = 1_000
    output: Annotated[Path | None, arg(aliases=("-o",))] = None
    """Write all results as JSON."""
    mosaic: Path | None = None
    """Write a PNG of drawings beside the real ones, a file for each split."""


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
    repeats: Annotated[int, Range(1, 1_000)] = 1
    """How many times each caption is drawn, each time with so many candidates."""
    seed: Seed = 1_000
    judge: Path | None = None
    """The folder where judges are kept; by default DATA-judge."""
    epochs: Annotated[int, Range(1, 10_000)] = 20
    """How often the judge sees each real picture in its training."""
    output: Annotated[Path | None, arg(aliases=("-o",))] = None
    """Write all results as JSON."""


@dataclass(frozen=True, kw_only=True)
class DrawGrid(Checked):
    """Draw icons on one sheet: a row for each subject, a column for each style, held-out combinations framed."""

    model: Positional[str]
    """A bundled model by name, or a folder."""
    data: Positional[str]
    """The data set that `limner data icons` wrote."""
    output: Annotated[Path, arg(aliases=("-o",))]
    """A PNG file."""
    subjects: tuple[str, ...] = ()
    """Names of subjects; by default eight subjects with a held-out combination."""
    candidates: Annotated[int, CANDIDATES] = 16
    seed: Annotated[int, SEEDS] = 1_000
    real: bool = False
    """Show the real picture beside each drawing."""


def main(argv: Sequence[str]) -> None:
    kinds = {
        "composition": composition, "pairs": pairs, "reconstruction": reconstruction, "zero-shot": zero_shot,
        "emoji": emoji, "icons": icons, "grid": grid,
    }  # fmt: skip
    dispatch("limner evaluate", kinds, argv)


def composition(argv: Sequence[str]) -> None:
    """do drawings of scenes show what their captions say?"""
    options = parse(ScoreComposition, argv, "limner evaluate composition")
    _places(options.output)
    if not options.things:
        raise UserError("things must be one number from 1 to 4 at least")
    from limner.evaluation import composition as evaluation
    from limner.pipeline import load

    pipe = load(options.model)
    captions = evaluation.captions_for(options.split, options.things, options.captions, options.seed)
    begun = time.monotonic()
    with progress("drawing and judging", len(captions) * options.candidates, unit="drawing") as bar:
        result = evaluation.score(pipe, captions, _settings(options), progress=bar.advance)
    print(f"{printable(pipe.name)}, {options.split} combinations, {clock(time.monotonic() - begun)}\n{result.table()}")
    _keep(result.save, options.output)


def pairs(argv: Sequence[str]) -> None:
    """given the upper half, is the lower half drawn as the caption says?"""
    options = parse(ScorePairs, argv, "limner evaluate pairs")
    _places(options.output)
    from limner.evaluation import composition as evaluation
    from limner.pipeline import load

    pipe = load(options.model)
    asked = evaluation.pairs_for(options.split, options.pairs, options.seed)
    with progress("drawing and judging", len(asked) * options.candidates, unit="drawing") as bar:
        result = evaluation.score_pairs(pipe, asked, _settings(options), progress=bar.advance)
    print(f"{printable(pipe.name)}, {options.split} combinations\n{result.table()}")
    _keep(result.save, options.output)


def _keep(save: Callable[[Path], object], path: Path | None) -> None:
    if path:
        save(path)
        print(f"written: {printable(path)}")


def _places(*paths: Path | None) -> None:
    """Complains before any work is done."""
    for path in filter(None, paths):
        place(path)


def _of_split(path: Path, split: str) -> Path:
    place(path)  # which has a name to add to
    return path.with_stem(f"{path.stem}-{split}")


def _settings(options: ScoreComposition | ScorePairs) -> CompositionSettings:
    from limner.evaluation.composition import CompositionSettings

    return CompositionSettings(candidates=options.candidates, seed=options.seed, sampler=options.sampler)


def reconstruction(argv: Sequence[str]) -> None:
    """what does the dVAE lose of pictures it has not seen?"""
    options = parse(ScoreReconstruction, argv, "limner evaluate reconstruction")
    _places(options.output)
    from limner.evaluation import reconstruction as evaluation
    from limner.pipeline import load

    pipe = load(options.model)
    size = pipe.dvae.config.size
    if options.data is None:
        if size % 12:
            raise UserError(f"scenes have a size that is a multiple of 12, this model draws {size} pixels: give --data")
        pictures = evaluation.fresh_scenes(
            options.count, options.seed, None if options.split == "both" else options.split, size
        )
    else:
        import numpy as np

        from limner.data.datasets import ImageCaptionDataset
        from limner.data.sources import open_source

        source = open_source(options.data, split="held-out")
        chosen = np.linspace(0, len(source) - 1, min(len(source), options.count)).astype(int)
        pictures = ImageCaptionDataset(source, size).load(chosen)[1]
    with progress("reconstructing", len(pictures), unit="picture") as bar:
        result = evaluation.measure(pipe.dvae, pictures, read=options.data is None, progress=bar.advance)
    print(f"{printable(pipe.name)}\n{result.table()}")
    _keep(result.save, options.output)


def zero_shot(argv: Sequence[str]) -> None:
    """does the contrastive model know classes by their names?"""
    options = parse(ScoreZeroShot, argv, "limner evaluate zero-shot")
    _places(options.output)
    from limner.data.sources import open_source
    from limner.evaluation import zero_shot as evaluation
    from limner.pipeline import load

    pipe = load(options.model)
    size = pipe.contrastive.config.size
    if options.data is None:
        task = evaluation.scenes(options.count, size, options.split, options.seed)
    else:
        task = evaluation.pictures_of(open_source(options.data), size, options.split, options.count, options.seed)
    total = len(task.names) * len(task.prompts) + len(task.labels)
    with progress("prompts and pictures", total, unit="text or picture") as bar:
        result = evaluation.evaluate(pipe, task, bar.advance)
    print(f"{printable(pipe.name)}, {options.split}\n{result.table()}")
    _keep(result.save, options.output)


def emoji(argv: Sequence[str]) -> None:
    """is the nearest real picture the right one?"""
    options = parse(ScoreEmoji, argv, "limner evaluate emoji")
    mosaics = [_of_split(options.mosaic, split) for split in ("train", "held-out")] if options.mosaic else []
    _places(options.output, *mosaics)
    from limner.data.sources import open_source
    from limner.evaluation import nearest as evaluation
    from limner.evaluation.report import save_png
    from limner.pipeline import load

    source = open_source(options.data)
    pipe = load(options.model)
    gallery = evaluation.Gallery.of(source, pipe.dvae.config.size)
    results = []
    for split in ("train", "held-out"):
        total = len(gallery.choose(split, options.captions, options.seed)) * options.repeats
        if total == 0:
            continue
        with progress(f"drawing, {split}", total, unit="drawing") as bar:
            result = evaluation.evaluate(
                pipe, gallery, split, n=options.captions, candidates=options.candidates, repeats=options.repeats,
                seed=options.seed, progress=bar.advance,
            )  # fmt: skip
        results.append(result)
        print(result.table())
        if options.mosaic:
            path = save_png(evaluation.mosaic(gallery, result), _of_split(options.mosaic, split))
            print(f"written: {printable(path)}")
    _keep(lambda path: evaluation.save(path, gallery, results), options.output)


def icons(argv: Sequence[str]) -> None:
    """are subjects drawn in styles that they were never seen in?"""
    options = parse(ScoreIcons, argv, "limner evaluate icons")
    _places(options.output)
    kept = options.judge and place(options.judge, folder=True)
    from limner.data.sources import open_source
    from limner.evaluation import icons as evaluation
    from limner.evaluation.judge import JudgeConfig, steps_of, trained
    from limner.pipeline import load

    source, pipe = open_source(options.data), load(options.model)
    there = Path(options.data).resolve()
    kept = kept or place(there.parent / f"{there.name}-judge", folder=True)
    data = evaluation.Icons.of(source, pipe.dvae.config.size)
    labelled, config = data.labelled, JudgeConfig(epochs=options.epochs)
    with progress("the judge", steps_of(labelled, config)) as bar:
        judge = trained(labelled, kept, config, bar)
    accuracy = evaluation.accuracy(judge, data)
    told = ", ".join(f"{respect} of {share:.1%}" for respect, share in accuracy.items())
    print(f"the judge reads of the {len(labelled):,} real pictures, on which it was trained: {told}")
    settings = evaluation.IconSettings(
        captions=options.captions, candidates=options.candidates, repeats=options.repeats, seed=options.seed
    )
    results = []
    asked = [(evaluation.evaluate, split, data.gallery.splits.count(split)) for split in evaluation.SPLITS]
    asked += [(evaluation.evaluate_pairs, kind, data.pairs.kinds.count(kind)) for kind in sorted(set(data.pairs.kinds))]
    for evaluate, what, count in asked:
        if total := min(count, settings.captions) * settings.repeats * settings.candidates:
            with progress(f"drawing, {printable(what)}", total, unit="drawing") as bar:
                results.append(evaluate(pipe, data, judge, what, settings, bar.advance))
            print(results[-1].table())
    _keep(lambda path: evaluation.save(path, accuracy, results), options.output)


def grid(argv: Sequence[str]) -> None:
    """draw a sheet of icons, subjects down and styles across"""
    options = parse(DrawGrid, argv, "limner evaluate grid")
    _places(options.output)
    from limner.data.sources import open_source
    from limner.evaluation import icon_grid
    from limner.evaluation.icons import Icons
    from limner.evaluation.report import save_png
    from limner.pipeline import load

    source, pipe = open_source(options.data), load(options.model)
    data = Icons.of(source, pipe.dvae.config.size)
    chosen = icon_grid.cells(data, options.subjects)
    with progress("drawing", len(chosen) * options.candidates, unit="drawing") as bar:
        drawings = icon_grid.draw(pipe, data, chosen, options.candidates, options.seed, bar.advance)
    path = save_png(icon_grid.sheet(data, chosen, drawings, options.real), options.output)
    print(f"written: {printable(path)}")
