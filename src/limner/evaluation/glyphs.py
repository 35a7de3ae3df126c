"""Share of drawings of monochrome icons that show the subject and the style that their caption names.

A drawing shows its subject if, of all real icons of the style, the icon of the caption is the nearest by squared error.
The bundle's training pictures are followed as in every drawing (`retrieval.py`).
A classifier of styles, trained on training icons only, reads the style. Its accuracy on real icons that it did not see
is the ceiling. For held-out combinations the table also has these rows:

- copies instead of drawings: the training icon of the subject in the nearest other style;
- drawings from captions alone, if the bundle has pictures to follow;
- real icons through the dVAE: the ceiling of the nearest icon.

A set often shows a held-out subject in another variant ("thin" where "bold" is held out). A second table has the
captions whose set lacks the subject in training in all variants.

`evaluate_variants` asks for another look of an icon that is given, in sets that no training saw.

Shapes: B captions, M icons of a style, H x W pixels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from math import prod

import numpy as np
import torch
from torch import Tensor

from limner.errors import UserError
from limner.evaluation.generate_batches import to_image
from limner.evaluation.icon_classifier import IconClassifier, LabeledIcons
from limner.evaluation.icon_pictures import SPLITS, Icons
from limner.evaluation.icons import baselines
from limner.evaluation.nearest_neighbor import ReferenceSettings, comparison_result, draw_and_compare, sheet_rows
from limner.evaluation.report import SheetRow
from limner.evaluation.result import EvalResult, Verdicts
from limner.pipeline import TextToImage
from limner.progress import Advance
from limner.sampling.generation_config import UNSET

_PER_STYLE = 300  # most training icons of a style for the classifier
_TOP = 5
_TOLERANCE = 1e-3  # between squared errors to equal icons, from rounding


def style_data(icons: Icons, also: Sequence[int] = (), seed: int = 0) -> LabeledIcons:
    """Return training data of the classifier of styles: at most `_PER_STYLE` icons of each style, of the training icons
    and the rows `also`."""
    by_style = defaultdict[str, list[int]](list)
    for i in np.random.default_rng(seed).permutation([*icons.references.split_indices("train"), *also]).tolist():
        by_style[icons.styles[i]].append(i)
    chosen = sorted(i for indices in by_style.values() for i in indices[:_PER_STYLE])
    subjects = ["icon"] * len(chosen)  # one class: the classifier learns styles alone
    return LabeledIcons(icons.references.pictures[chosen], subjects, [icons.styles[i] for i in chosen])


def style_accuracy(classifier: IconClassifier, icons: Icons, count: int = 4_096, seed: int = 0) -> float:
    """Return the accuracy of the classifier on `count` real icons of held-out combinations.

    Raises `UserError` without such icons.
    """
    chosen = icons.references.split_indices("combination", count, seed)
    if not chosen:
        raise UserError("the data set lacks held-out combinations: write it from more sets with `limner data glyphs`")
    _, styles = classifier.classify(icons.references.pictures[chosen])
    return float(np.mean([icons.styles[i] == style for i, style in zip(chosen, styles, strict=True)]))


class StyleRanks:
    """Ranks of the icon of a caption among all real icons of its style."""

    def __init__(self, icons: Icons) -> None:
        self.styles, self.pictures = icons.styles, icons.references.pictures
        self.by_style = defaultdict[str, list[int]](list)
        for i, style in enumerate(icons.styles):
            self.by_style[style].append(i)

    def __call__(self, pictures: Tensor, targets: Sequence[int]) -> np.ndarray:
        """Return how many icons of the style are nearer than the target: uint8 [B, 3, H, W] -> [B]."""
        ranks = np.empty(len(targets), int)
        for style in {self.styles[t] for t in targets}:
            rows = [row for row, t in enumerate(targets) if self.styles[t] == style]
            indices = self.by_style[style]
            real, drawn = (x[:, 0].flatten(1).float() / 255 for x in (self.pictures[indices], pictures[rows]))
            errors = real.square().sum(1) - 2 * drawn @ real.T  # less the drawing's square, which is constant
            own = errors.gather(1, torch.tensor([[bisect_left(indices, targets[row])] for row in rows]))
            ranks[rows] = (errors < own - _TOLERANCE).sum(1).numpy()
        return ranks

    def verdicts(self, pictures: Tensor, targets: Sequence[int]) -> Verdicts:
        """Return whether the target is the nearest icon of its style, or among the nearest ones."""
        ranks = self(pictures, targets)
        return {"subject": ranks == 0, f"top {_TOP}": ranks < _TOP}

    def chances(self, targets: Sequence[int]) -> dict[str, float]:
        """Return the mean probability that a random icon of the style is right, by respect."""
        chance = float(np.mean([1 / len(self.by_style[self.styles[t]]) for t in targets]))
        return {"subject": chance, f"top {_TOP}": _TOP * chance}


def evaluate(
    pipe: TextToImage,
    icons: Icons,
    classifier: IconClassifier,
    split: str,
    settings: ReferenceSettings,
    progress: Advance | None = None,
) -> list[EvalResult]:
    """Draw captions of a split and compare the drawings with the real icons of the same style.

    Combinations are drawn twice if the model has examples: the second time from captions alone. Returns the result; for
    combinations also that of the captions whose set lacks the subject in training.
    """
    references = icons.references
    targets, ranks = references.targets(split, settings), StyleRanks(icons)

    def verdict(pictures: Tensor, targets: Sequence[int]) -> Verdicts:
        subject, (_, styles) = ranks.verdicts(pictures, targets), classifier.classify(pictures)
        style = np.array([icons.styles[t] == name for t, name in zip(targets, styles, strict=True)])
        return {**subject, "style": style, "both": subject["subject"] & style}

    rows, drawings = draw_and_compare(pipe, references, targets, verdict, settings, progress)
    sheet = sheet_rows(references, targets, drawings, rows[f"best of {settings.candidates}"]["subject"])
    copies = icons.nearest_style_copies(targets) if split == "combination" else []
    if split == "combination" and pipe.examples:
        alone = torch.full((len(targets), prod(pipe.dvae.config.grid)), UNSET)
        drawn, _ = draw_and_compare(pipe, references, targets, verdict, settings, progress, alone)
        rows |= {f"{name}, from captions alone": verdicts for name, verdicts in drawn.items()}
    rows |= baselines(pipe, icons, targets, copies, verdict)

    def result(name: str, cases: Sequence[int], sheet: Sequence[SheetRow] = ()) -> EvalResult:
        shown = [targets[i] for i in cases]
        verdicts = {row: {respect: values[cases] for respect, values in of_row.items()} for row, of_row in rows.items()}
        chances, style = ranks.chances(shown), 1 / len(classifier.styles)
        chances |= {"style": style, "both": chances["subject"] * style}
        return comparison_result(name, pipe, references, shown, settings, verdicts, chances, sheet)

    trained = {(icons.sets[i], references.keys[i]) for i in references.split_indices("train")}
    lacking = [i for i, t in enumerate(targets) if (icons.sets[t], references.keys[t]) not in trained]
    results = [result(SPLITS.get(split, split), range(len(targets)), sheet)]
    return [*results, result("icons that the set lacks", lacking)] if split == "combination" and lacking else results


def evaluate_variants(
    pipe: TextToImage, icons: Icons, settings: ReferenceSettings, progress: Advance | None = None
) -> list[EvalResult]:
    """Give icons of sets that no training saw, and ask for another look of each, as in "the same, filled".

    Returns no result if the model cannot follow a picture, or no such set has a subject in two looks.
    """
    real, ranks, variants = icons.references, StyleRanks(icons), defaultdict[tuple[str, str], list[int]](list)
    for i in real.split_indices("set"):
        variants[icons.sets[i], real.keys[i]].append(i)
    pairs = [(a, b) for same in variants.values() for a, b in permutations(same, 2) if icons.looks[a] != icons.looks[b]]
    if not pairs or not pipe.prior.config.condition_blocks:
        return []
    chosen = np.random.default_rng(settings.seed).permutation(len(pairs))[: settings.captions]
    given, targets = ([pairs[i][side] for i in chosen] * settings.repeats for side in (0, 1))
    asked = replace(real, captions=[f"the same, {look}" for look in icons.looks])
    images = [to_image(real.pictures[i]) for i in given]
    tokens = torch.cat([pipe.like(image) for image in images])
    rows, drawings = draw_and_compare(pipe, asked, targets, ranks.verdicts, settings, progress, tokens)
    drawn = sheet_rows(asked, targets, drawings, rows[f"best of {settings.candidates}"]["subject"])
    sheet = [replace(row, pictures=[*row.pictures, (image, "given")]) for row, image in zip(drawn, images, strict=True)]
    rows["the given icons"] = ranks.verdicts(real.pictures[given], targets)
    title, chances = "other looks of icons of unseen sets", ranks.chances(targets)
    return [comparison_result(title, pipe, asked, targets, settings, rows, chances, sheet)]
