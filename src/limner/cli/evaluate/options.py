"""Options of the commands of `limner evaluate`.

The defaults are those of published results: many captions, and seeds from 1,000 on, which are reserved for testing. To
choose between models or settings, give a seed below 1,000.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from limner.cli.arguments import OutputFile, Writable
from limner.evaluation.confidence import TEST_SEEDS_FROM
from limner.sampling.generation_config import CANDIDATES, Sampler
from limner.validation import SEEDS, Range, Validated

Count = Annotated[int, Range(1, 10**6)]


@dataclass(frozen=True, kw_only=True)
class Options(Validated):
    """Options of all commands."""

    model: Positional[str]
    """Name of a bundled model, or a folder."""
    seed: Annotated[int, SEEDS] = TEST_SEEDS_FROM
    """Seed of the samples and their drawings. Compare models with seeds below 1,000; publish results of seeds from
    1,000 on."""


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(Options):
    """Options of the commands that compute a score."""

    output: OutputFile = None
    """Write all results as JSON."""
    page: Annotated[Path | None, Writable("file")] = None
    """Write an HTML page with tables, curves and drawings, in one file."""


@dataclass(frozen=True, kw_only=True)
class ScoreAll(ScoreOptions):
    """Measure a model: all evaluations that need no more than new scenes (`composition`, `pairs`, `reconstruction`,
    `zero-shot`), or with --data those on any data set (`reconstruction`, `fidelity`).
    """

    model: Positional[str] = "scenes"
    data: Annotated[str | None, arg(metavar="DATA")] = None
    """A data set with captions, for a model that does not draw scenes."""
    captions: Count = 1_000
    """Number of captions to draw, and of pictures; a quarter as many pairs."""
    candidates: Annotated[int, CANDIDATES] = 16
    """Candidates per caption, of which the one with the best score counts."""


@dataclass(frozen=True, kw_only=True)
class SceneOptions(ScoreOptions):
    """Options of the commands that draw synthetic scenes and check them with a scene parser."""

    model: Positional[str] = "scenes"
    split: Literal["held-out", "train"] = "held-out"
    """Captions with combinations held out of training, or with combinations of the training split."""
    sampler: Annotated[Sampler, arg(name="")] = Sampler()


@dataclass(frozen=True, kw_only=True)
class ScoreComposition(SceneOptions):
    """Draw captions of synthetic scenes and check with a scene parser if every attribute and relation is right.

    Intervals are 95%, over combinations of size, fill, color, shape and background; all held-out captions share 30
    combinations. The gain of more candidates is a paired difference per caption, with its interval.
    """

    captions: Count = 1_024
    """Number of captions to draw."""
    objects: Annotated[tuple[int, ...], Range(1, 4)] = (1, 2)
    """Numbers of objects in a scene, used cyclically."""
    candidates: Annotated[int, CANDIDATES] = 64
    """Candidates per caption, of which the one with the best score counts."""
    mosaic: Annotated[Path | None, Writable("PNG")] = None
    """Write a PNG of drawings of the first captions, at most eight, next to real scenes."""


@dataclass(frozen=True, kw_only=True)
class ScorePairs(SceneOptions):
    """Draw the lower half of a pair ("the exact same scene on the top as a sketch at the bottom") with the upper half
    given, and check it with a scene parser. Intervals are 95%, over combinations, as for `composition`."""

    pairs: Count = 1_024
    """Number of pairs to draw."""
    candidates: Annotated[int, CANDIDATES] = 16
    """Candidates per pair, of which the likeliest under the prior counts."""


@dataclass(frozen=True, kw_only=True)
class ScoreGenEval(SceneOptions):
    """Draw prompts of GenEval's six tasks with the objects of scenes, and check the best four drawings of each with the
    scene parser. Only what a task is about is checked, such as the colors of two objects. Intervals are 95%, over
    prompts.

    With --data and --detector, the prompts are captions of icons and the task is a single object."""

    data: Annotated[str | None, arg(metavar="DATA")] = None
    """A data set of `limner data icons`, for a model of icons."""
    detector: Annotated[str | None, arg(metavar="RUN")] = None
    """The detector that checks drawings of icons, from `limner detector DATA --out RUN`."""
    prompts: Count = 600
    """Number of prompts, which cycle through the six tasks."""
    candidates: Annotated[int, Range(4, 2**16)] = 16
    """Candidates per prompt, of which the best four are checked."""
    folder: Annotated[Path | None, arg(metavar="FOLDER"), Writable("folder")] = None
    """Write the drawings in GenEval's layout: `00000/metadata.jsonl` and `00000/samples/00000.png`."""


@dataclass(frozen=True, kw_only=True)
class ScoreReconstruction(ScoreOptions):
    """Reconstruct unseen pictures with a model's dVAE: PSNR, codes in use, and the accuracy of a scene parser."""

    model: Positional[str] = "scenes"
    data: Annotated[str | None, arg(metavar="DATA")] = None
    """A data set with held-out samples; by default new scenes, which a scene parser also checks."""
    split: Literal["both", "train", "held-out"] = "both"
    """Split of the combinations in new scenes."""
    count: Count = 1_024
    """Maximum number of pictures; of single objects that the parser reads, three times as many."""


@dataclass(frozen=True, kw_only=True)
class ScoreZeroShot(ScoreOptions):
    """Classify pictures with a model's contrastive model, from the names of the classes alone."""

    model: Positional[str] = "scenes"
    """Name of a bundled model, or a folder; also that of a run that has trained only a contrastive model, or a CLIP
    model of `limner convert clip`."""
    data: Annotated[str | None, arg(metavar="DATA")] = None
    """A folder with a folder of pictures for each class, as ImageNet's, or a data set whose captions are the classes,
    such as that of `limner data emoji`; by default new scenes of one object."""
    classes: Annotated[Path | None, arg(metavar="FILE")] = None
    """Names of the classes of --data, one per line: the folder or caption, a tab, and the name; a WordNet id, a space,
    and the name; or a name alone. Without a file, folders and captions are the names."""
    prompts: Annotated[Path | None, arg(metavar="FILE")] = None
    """Prompt templates, one per line, with {} for the name of the class; by default CLIP's 80 for class folders."""
    split: Literal["train", "held-out"] = "held-out"
    """Pictures of the training split, or with combinations held out of training; all pictures of class folders are
    held out."""
    count: Count = 1_024
    """Maximum number of pictures."""


@dataclass(frozen=True, kw_only=True)
class ScoreFidelity(ScoreOptions):
    """Draw captions of a data set and compare features of the drawings with those of real pictures: KID, FID, Inception
    Score, precision, recall, density and coverage.

    Held-out captions are drawn if the data set has a split. The floor compares real pictures with real pictures.
    Intervals are 95%, by a bootstrap over captions.
    """

    data: Positional[str]
    """A data set: pictures with captions, tables, shards, COCO or CUB."""
    captions: Count = 1_000
    """Maximum number of captions."""
    extractor: str = "lite0"
    """Network whose features are compared: "lite0" (EfficientNet-Lite0), "clip" (the contrastive model of MODEL),
    "clip:FOLDER" (a CLIP model of `limner convert clip`), "inception:FILE" or "inception-bilinear:FILE" (weights of
    FID's Inception, resized as clean-fid or as pytorch-fid does)."""
    best_of: Annotated[tuple[int, ...], CANDIDATES, arg(metavar="N ...")] = (16,)
    """Candidates per caption, of which the one with the best score counts. Several numbers share the drawings of the
    largest."""
    blur: Annotated[tuple[float, ...], Range(0, 64), arg(metavar="RADIUS ...")] = (0.0,)
    """Radii of a Gaussian filter on drawings and real pictures, in pixels of the model."""
    reference: Annotated[Literal["rest", "all"] | Path, arg(metavar="rest|all|FILE.npz")] = "rest"
    """Compare with as many pictures of other captions, or with all pictures as papers do, or by FID alone with
    statistics that pytorch-fid has written."""
    without: Annotated[Path | None, arg(metavar="FILE")] = None
    """Leave out pictures that training has seen, by a file of `limner data overlap DATA -o FILE`."""
    sampler: Annotated[Sampler, arg(name="")] = Sampler()


@dataclass(frozen=True, kw_only=True)
class ScoreEmoji(ScoreOptions):
    """Draw captions of an emoji data set and find the nearest real emoji in the whole set.

    Intervals are 95%, over families: variants of tone, gender, hair and direction count as one family.
    """

    data: Positional[str]
    """A data set of `limner data emoji`."""
    captions: Count = 256
    """Captions per split, chosen at random."""
    candidates: Annotated[int, CANDIDATES] = 16
    """Candidates per caption, of which the one with the best score counts."""
    repeats: Annotated[int, Range(1, 1_000)] = 4
    """Drawings per caption, each from new candidates: held-out captions are few."""
    mosaic: Annotated[Path | None, Writable("PNG")] = None
    """Write a PNG of drawings next to real emoji, one file per split."""


@dataclass(frozen=True, kw_only=True)
class ScoreIcons(ScoreOptions):
    """Draw subjects in styles held out of training, and classify subject and style of the drawings. Held-out pairs are
    drawn with their upper half given.

    The first call trains the classifier on all real pictures and saves it. Intervals are 95%, over subjects.
    """

    data: Positional[str]
    """A data set of `limner data icons`."""
    captions: Count = 256
    """Captions per split, and pairs per kind, chosen at random."""
    candidates: Annotated[int, CANDIDATES] = 16
    """Candidates per caption; the contrastive model ranks them, for pairs the likelihood under the prior does."""
    repeats: Annotated[int, Range(1, 1_000)] = 1
    """Drawings per caption, each from new candidates."""
    classifier: Annotated[Path | None, arg(metavar="FOLDER"), Writable("folder")] = None
    """Folder of saved classifiers; by default `DATA-classifier`."""
    classifier_steps: Annotated[int, Range(1, 10**7)] = 6_000
    """Training steps of the classifier, 64 pictures each."""
    mosaic: Annotated[Path | None, Writable("PNG")] = None
    """Write a PNG of drawings next to real icons, one file per split."""


@dataclass(frozen=True, kw_only=True)
class ScoreGlyphs(ScoreIcons):
    """Draw monochrome icons in styles held out of training, and find the nearest real icon of the style.

    The first call trains a classifier of styles on training icons and saves it. Intervals are 95%, over subjects.
    """

    data: Positional[str]
    """A data set of `limner data glyphs`."""
    captions: Count = 500
    """Captions per split, chosen at random."""
    candidates: Annotated[int, CANDIDATES] = 16
    """Candidates per caption, of which the one with the best score counts."""


@dataclass(frozen=True, kw_only=True)
class ScoreDetector(ScoreOptions):
    """Measure a detector: average precision, time per picture, and agreement with the scene parser on drawings."""

    model: Positional[str]
    """Folder of a run of `limner detector`."""
    data: Annotated[str | None, arg(metavar="FOLDER")] = None
    """Pictures with boxes in COCO's format; by default new scenes."""
    split: Literal["train", "held-out"] = "held-out"
    """Split of the combinations in new scenes and in the captions of drawings."""
    count: Count = 1_024
    """Maximum number of pictures."""
    drawings: Annotated[str | None, arg(metavar="NAME|FOLDER")] = None
    """A model of scenes, such as "scenes": compare the detector with the scene parser on its drawings."""
    captions: Count = 256
    """Number of captions to draw."""


@dataclass(frozen=True, kw_only=True)
class DrawGrid(Options):
    """Draw icons on one sheet: a row per subject, a column per style, frames around held-out combinations."""

    data: Positional[str]
    """A data set of `limner data icons` or `limner data glyphs`."""
    output: Annotated[Path, arg(aliases=("-o",)), Writable("PNG")]
    """A PNG file."""
    subjects: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = ()
    """Names of subjects; by default eight subjects with a held-out combination."""
    candidates: Annotated[int, CANDIDATES] = 16
    """Candidates per combination, of which the one with the best score is shown."""
    real: bool = False
    """Show the real picture next to each drawing."""
