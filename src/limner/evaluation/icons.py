"""Share of drawings of icons that show the subject and the style that their caption names.

A data set of icons (`limner data icons`) has the same subjects in several styles. Some combinations of subject and
style are held out, and some subjects in all styles. The model draws their captions, and training captions for
comparison. A classifier trained on all real pictures (`icon_classifier.py`) reads subject and style of each drawing.
Baselines and ceilings:

- the nearest of all real pictures by squared error instead of the classifier;
- for held-out combinations, copies instead of drawings: the training picture of the subject in the nearest style. The
  distance of two styles is the mean squared error over the subjects that training has in both;
- real pictures instead of drawings, and their reconstructions by the model's dVAE: ceilings.

A held-out pair is drawn with its real upper half as a prompt (Ramesh et al. 2021, Figure 14), tokenized above an empty
lower half. For the kind "style", the classifier reads the enlarged lower half. For other kinds, such as "upside down",
the lower half is compared with the real lower halves of all held-out pairs of that kind, and is right if the real one
of its pair is the nearest.

Drawings that differ only in skin tone count as one subject. Intervals are clustered by subject.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from limner.evaluation.generate_batches import to_image
from limner.evaluation.icon_classifier import IconClassifier
from limner.evaluation.icon_pictures import SPLITS, Icons
from limner.evaluation.nearest_neighbor import (
    ReferenceSettings,
    comparison_result,
    draw_and_compare,
    nearest_picture,
    sheet_rows,
)
from limner.evaluation.reconstruction import reconstructions
from limner.evaluation.result import EvalResult, Verdicts
from limner.pipeline import TextToImage
from limner.progress import Advance

_SUBJECT_AND_STYLE = "subject and style"
_MATCH = "right"


def evaluate(
    pipe: TextToImage,
    icons: Icons,
    classifier: IconClassifier,
    split: str,
    settings: ReferenceSettings,
    progress: Advance | None = None,
) -> list[EvalResult]:
    """Draw captions of a split and classify the drawings."""
    references, styles = icons.references, icons.styles
    targets = references.targets(split, settings)

    def verdict(pictures: Tensor, targets: Sequence[int]) -> Verdicts:
        return _verdicts(classifier.classify(pictures), references.families, styles, targets)

    rows, drawings = draw_and_compare(pipe, references, targets, verdict, settings, progress)
    nearest = nearest_picture(references.pictures, drawings).tolist()
    labels = [references.families[i] for i in nearest], [styles[i] for i in nearest]
    rows[f"best of {settings.candidates}, nearest picture"] = _verdicts(labels, references.families, styles, targets)
    copies = icons.nearest_style_copies(targets) if split == "combination" else []
    rows |= baselines(pipe, icons, targets, copies, verdict)
    sheet = sheet_rows(references, targets, drawings, rows[f"best of {settings.candidates}"][_SUBJECT_AND_STYLE])
    name = SPLITS.get(split, split)
    return [comparison_result(name, pipe, references, targets, settings, rows, _chance(classifier), sheet)]


def baselines(
    pipe: TextToImage,
    icons: Icons,
    targets: Sequence[int],
    copies: Sequence[int | None],
    verdict: Callable[[Tensor, Sequence[int]], Verdicts],
) -> dict[str, Verdicts]:
    """Return verdicts on real pictures instead of drawings of `targets`, by row of the table; `copies` are those of
    `Icons.nearest_style_copies`, or empty."""
    pictures, rows = icons.references.pictures, dict[str, Verdicts]()
    if copies:
        exists = np.array([copy is not None for copy in copies])
        copied = verdict(pictures[[copy or 0 for copy in copies]], targets)
        rows["copies from nearest style"] = {respect: right & exists for respect, right in copied.items()}
    rows["real pictures"] = verdict(pictures[targets], targets)
    reconstructed = torch.cat([part.cpu() for *_, part in reconstructions(pipe.dvae, pictures[targets])])
    return {**rows, "real, through the dVAE": verdict(reconstructed, targets)}


def evaluate_pairs(
    pipe: TextToImage,
    icons: Icons,
    classifier: IconClassifier,
    kind: str,
    settings: ReferenceSettings,
    progress: Advance | None = None,
) -> list[EvalResult]:
    """Draw the lower halves of the held-out pairs of a kind, with the real upper halves as prompts."""
    pairs = icons.pairs
    targets = pairs.targets(kind, settings)
    real = _lower_halves(pairs.pictures[pairs.split_indices(kind)])
    tops = pairs.pictures[targets]
    _lower_halves(tops)[:] = tops[:, :, :1, :1]  # background: the encoder's receptive field must not reach the answer
    keep_rows = pipe.dvae.config.grid[0] // 2
    prompt_tokens = torch.cat([pipe.prime(to_image(top), keep_rows=keep_rows) for top in tops])

    def classified(pictures: Tensor, targets: Sequence[int]) -> Verdicts:
        labels = classifier.classify(enlarge_middle(_lower_halves(pictures)))
        return _verdicts(labels, pairs.families, icons.pair_styles, targets)

    def matched(pictures: Tensor, targets: Sequence[int]) -> Verdicts:
        nearest = real[nearest_picture(real, _lower_halves(pictures))]
        same = nearest == _lower_halves(pairs.pictures[targets])
        return {_MATCH: same.flatten(1).all(1).numpy()}  # by pixels: two pairs can be equal

    verdict = classified if kind == "style" else matched
    rows, _ = draw_and_compare(pipe, pairs, targets, verdict, settings, progress, prompt_tokens)
    chance = {_MATCH: 1 / len(real)}
    if kind == "style":
        rows["real lower halves"] = classified(pairs.pictures[targets], targets)
        chance = _chance(classifier)
    return [comparison_result(f"held-out pairs, {kind}", pipe, pairs, targets, settings, rows, chance)]


def accuracy(classifier: IconClassifier, icons: Icons) -> dict[str, float]:
    """Return the accuracy of the classifier on its training data, all real pictures."""
    references = icons.references
    labels = classifier.classify(references.pictures)
    verdicts = _verdicts(labels, references.families, icons.styles, range(len(icons.styles)))
    return {respect: float(right.mean()) for respect, right in verdicts.items()}


def enlarge_middle(halves: Tensor) -> Tensor:
    """Return the middle squares of uint8 [B, 3, h, 2h], enlarged to uint8 [B, 3, 2h, 2h]."""
    h = halves.shape[2]
    middle = halves[..., h // 2 : h // 2 + h].float()
    return F.interpolate(middle, (2 * h, 2 * h), mode="bilinear").round().to(torch.uint8)


def _lower_halves(pictures: Tensor) -> Tensor:
    """Return the lower halves of [B, 3, H, W], a view [B, 3, H/2, W]."""
    return pictures[:, :, pictures.shape[2] // 2 :]


def _verdicts(
    labels: tuple[Sequence[str], Sequence[str]], subjects: Sequence[str], styles: Sequence[str], targets: Sequence[int]
) -> Verdicts:
    """Compare labels (subjects, styles) with the subjects and styles of `targets`."""
    subject, style = (
        np.array(named) == np.array([names[t] for t in targets])
        for named, names in zip(labels, (subjects, styles), strict=True)
    )
    return {_SUBJECT_AND_STYLE: subject & style, "subject": subject, "style": style}


def _chance(classifier: IconClassifier) -> dict[str, float]:
    subject, style = 1 / len(classifier.subjects), 1 / len(classifier.styles)
    return {_SUBJECT_AND_STYLE: subject * style, "subject": subject, "style": style}
