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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from limner.evaluation.confidence import TEST_SEEDS_FROM
from limner.evaluation.generate_batches import generate_batches, to_image
from limner.evaluation.icon_classifier import IconClassifier
from limner.evaluation.icon_pictures import SPLITS, Icons
from limner.evaluation.nearest_neighbor import ReferenceSet, nearest_picture
from limner.evaluation.reconstruction import reconstructions
from limner.evaluation.result import EvalResult, Verdicts
from limner.pipeline import TextToImage
from limner.progress import Advance
from limner.sampling.generation_config import CANDIDATES, Sampler
from limner.sampling.rerank import best
from limner.validation import SEEDS, Range, Validated

_SUBJECT_AND_STYLE = "subject and style"
_MATCH = "right"


@dataclass(frozen=True, kw_only=True)
class IconSettings(Validated):
    """Settings of the generation.

    Args:
        captions: maximum number of captions per split and of pairs per kind, sampled at random.
        candidates: drawings per caption, of which the best is selected.
        repeats: repetitions of the whole set of captions.
        seed: caption i uses `drawing_seed(seed, i)`.
    """

    captions: Annotated[int, Range(1, 10**6)] = 256
    candidates: Annotated[int, CANDIDATES] = 16
    repeats: Annotated[int, Range(1, 1_000)] = 1
    seed: Annotated[int, SEEDS] = TEST_SEEDS_FROM


def evaluate(
    pipe: TextToImage,
    icons: Icons,
    classifier: IconClassifier,
    split: str,
    settings: IconSettings = IconSettings(),
    progress: Advance | None = None,
) -> EvalResult:
    """Draw captions of a split and classify the drawings."""
    references, styles = icons.references, icons.styles
    targets = references.split_indices(split, settings.captions, settings.seed) * settings.repeats

    def verdict(pictures: Tensor, cases: Sequence[int]) -> Verdicts:
        return _verdicts(classifier.classify(pictures), references.families, styles, [targets[i] for i in cases])

    def verdict_on_real(indices: Sequence[int | None]) -> Verdicts:
        """Verdicts on real pictures instead of drawings; None counts as wrong."""
        pictures = references.pictures[[0 if i is None else i for i in indices]]
        exists = np.array([i is not None for i in indices])
        return {respect: right & exists for respect, right in verdict(pictures, range(len(indices))).items()}

    rows, drawings = draw_and_compare(pipe, references, targets, verdict, settings, progress)
    nearest = nearest_picture(references.pictures, drawings).tolist()
    labels = [references.families[i] for i in nearest], [styles[i] for i in nearest]
    rows[f"best of {settings.candidates}, nearest picture"] = _verdicts(labels, references.families, styles, targets)
    if split == "combination":
        rows["copies from nearest style"] = verdict_on_real(icons.nearest_style_copies(targets))
    rows["real pictures"] = verdict_on_real(targets)
    reconstructed = [part.cpu() for *_, part in reconstructions(pipe.dvae, references.pictures[targets])]
    rows["real, through the dVAE"] = verdict(torch.cat(reconstructed), range(len(targets)))
    return icon_result(SPLITS.get(split, split), pipe, references, targets, settings, rows, _chance(classifier))


def evaluate_pairs(
    pipe: TextToImage,
    icons: Icons,
    classifier: IconClassifier,
    kind: str,
    settings: IconSettings = IconSettings(),
    progress: Advance | None = None,
) -> EvalResult:
    """Draw the lower halves of the held-out pairs of a kind, with the real upper halves as prompts."""
    pairs = icons.pairs
    targets = pairs.split_indices(kind, settings.captions, settings.seed) * settings.repeats
    real = _lower_halves(pairs.pictures[pairs.split_indices(kind)])
    tops = pairs.pictures[targets]
    _lower_halves(tops)[:] = tops[:, :, :1, :1]  # background: the encoder's receptive field must not reach the answer
    images = [to_image(top) for top in tops]
    keep_rows = pipe.dvae.config.grid[0] // 2
    prompt_tokens = torch.cat([pipe.prime(image, keep_rows=keep_rows) for image in images])

    def classified(pictures: Tensor, cases: Sequence[int]) -> Verdicts:
        labels = classifier.classify(enlarge_middle(_lower_halves(pictures)))
        return _verdicts(labels, pairs.families, icons.pair_styles, [targets[i] for i in cases])

    def matched(pictures: Tensor, cases: Sequence[int]) -> Verdicts:
        target = _lower_halves(pairs.pictures[[targets[i] for i in cases]])
        nearest = real[nearest_picture(real, _lower_halves(pictures))]
        return {_MATCH: (nearest == target).flatten(1).all(1).numpy()}  # by pixels: two pairs can be equal

    verdict = classified if kind == "style" else matched
    rows, _ = draw_and_compare(pipe, pairs, targets, verdict, settings, progress, prompt_tokens)
    if kind == "style":
        rows["real lower halves"] = classified(pairs.pictures[targets], range(len(targets)))
    chance = _chance(classifier) if kind == "style" else {_MATCH: 1 / len(real)}
    return icon_result(f"held-out pairs, {kind}", pipe, pairs, targets, settings, rows, chance)


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


def draw_and_compare(
    pipe: TextToImage,
    references: ReferenceSet,
    targets: Sequence[int],
    verdict: Callable[[Tensor, Sequence[int]], Verdicts],
    settings: IconSettings,
    progress: Advance | None,
    prompt_tokens: Tensor | None = None,
) -> tuple[dict[str, Verdicts], Tensor]:
    """Draw the captions of `targets`. Return verdicts on the best drawings and on all candidates by row of the table,
    and the best drawings, uint8 [B, 3, H, W].

    `verdict` takes pictures and the indices of their targets.
    """
    n, captions = settings.candidates, [references.captions[t] for t in targets]
    best_drawings, right, picks = [], dict[str, list[np.ndarray]](), []
    for part, batch in generate_batches(pipe, captions, n, settings.seed, Sampler(), prompt_tokens, progress):
        picks.append(best(batch.scores, 1)[:, 0])
        best_drawings.append(batch.pictures[torch.arange(len(part)), picks[-1]])
        verdicts = verdict(batch.pictures.flatten(0, 1), [i for i in part for _ in range(n)])
        for respect, values in verdicts.items():
            right.setdefault(respect, []).append(values.reshape(len(part), n))
    candidates = {respect: np.concatenate(parts) for respect, parts in right.items()}
    pick = torch.cat(picks).numpy()[:, None]
    first = {respect: np.take_along_axis(values, pick, 1)[:, 0] for respect, values in candidates.items()}
    mean = {respect: values.mean(1) for respect, values in candidates.items()}
    return {f"best of {n}": first, "any candidate": mean}, torch.cat(best_drawings)


def icon_result(
    name: str,
    pipe: TextToImage,
    references: ReferenceSet,
    targets: Sequence[int],
    settings: IconSettings,
    rows: Mapping[str, Verdicts],
    chance: Mapping[str, float],
) -> EvalResult:
    """Return the result of drawings of `targets`, with intervals over subjects."""
    subjects = [references.families[t] for t in targets]
    captions = len(targets) // settings.repeats  # not the distinct ones: two pairs can have the same caption
    times = f", drawn {settings.repeats} times" if settings.repeats > 1 else ""
    return EvalResult.from_verdicts(
        f"{name}, {captions:,} captions of {len(set(subjects)):,} subjects{times}", rows, subjects,
        [{"caption": references.captions[t], "subject": references.families[t]} for t in targets], chance,
        settings={"model": pipe.name, **vars(settings)},
    )  # fmt: skip


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
