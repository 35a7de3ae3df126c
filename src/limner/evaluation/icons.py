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

Drawings that differ only in skin tone count as one subject.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from limner.evaluation.confidence import TEST_SEEDS_FROM
from limner.evaluation.generate_batches import generate_batches
from limner.evaluation.icon_classifier import IconClassifier
from limner.evaluation.icon_pictures import SPLITS, Icons
from limner.evaluation.icon_result import IconResult, Verdicts
from limner.evaluation.nearest_neighbor import nearest_picture
from limner.evaluation.reconstruction import reconstructions
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
) -> IconResult:
    """Draw captions of a split and classify the drawings."""
    references, styles = icons.references, icons.styles
    targets = references.split_indices(split, settings.captions, settings.seed) * settings.repeats
    captions, subjects = [references.captions[t] for t in targets], [references.families[t] for t in targets]

    def verdict(pictures: Tensor, cases: Sequence[int]) -> Verdicts:
        labels = classifier.classify(pictures)
        return _verdicts(labels, [subjects[i] for i in cases], [styles[targets[i]] for i in cases])

    def verdict_on_real(indices: Sequence[int | None]) -> Verdicts:
        """Verdicts on real pictures instead of drawings; None counts as wrong."""
        pictures = references.pictures[[0 if i is None else i for i in indices]]
        exists = np.array([i is not None for i in indices])
        return {respect: right & exists for respect, right in verdict(pictures, range(len(indices))).items()}

    results, best_drawings = _generate(pipe, captions, verdict, settings, progress=progress)
    nearest = nearest_picture(references.pictures, best_drawings).tolist()
    labels = [references.families[i] for i in nearest], [styles[i] for i in nearest]
    row = f"best of {settings.candidates}, nearest picture"
    results[row] = _verdicts(labels, subjects, [styles[t] for t in targets])
    if split == "combination":
        results["copied from the nearest style"] = verdict_on_real(icons.nearest_style_copies(targets))
    results["real pictures"] = verdict_on_real(targets)
    reconstructed = [part.cpu() for *_, part in reconstructions(pipe.dvae, references.pictures[targets])]
    results["real pictures, through the dVAE"] = verdict(torch.cat(reconstructed), range(len(targets)))
    title, chance = SPLITS.get(split, split), _chance(classifier)
    return IconResult(title, captions, subjects, results, chance, best_drawings, _metadata(pipe, settings))


def evaluate_pairs(
    pipe: TextToImage,
    icons: Icons,
    classifier: IconClassifier,
    kind: str,
    settings: IconSettings = IconSettings(),
    progress: Advance | None = None,
) -> IconResult:
    """Draw the lower halves of the held-out pairs of a kind, with the real upper halves as prompts."""
    pairs = icons.pairs
    of_kind = [i for i, name in enumerate(pairs.kinds) if name == kind]
    targets = _sample(of_kind, settings) * settings.repeats
    captions, subjects = [pairs.captions[t] for t in targets], [pairs.subjects[t] for t in targets]
    keep_rows = pipe.dvae.config.grid[0] // 2
    tops = pairs.pictures[targets]
    _lower_halves(tops)[:] = tops[:, :, :1, :1]  # background: the encoder's receptive field must not reach the answer
    prompt_tokens = torch.cat([pipe.prime(_image(top), keep_rows=keep_rows) for top in tops])
    real = _lower_halves(pairs.pictures[of_kind])

    def classified(pictures: Tensor, cases: Sequence[int]) -> Verdicts:
        labels = classifier.classify(enlarge_middle(_lower_halves(pictures)))
        return _verdicts(labels, [subjects[i] for i in cases], [pairs.styles[targets[i]] for i in cases])

    def matched(pictures: Tensor, cases: Sequence[int]) -> Verdicts:
        target = _lower_halves(pairs.pictures[[targets[i] for i in cases]])
        nearest = real[nearest_picture(real, _lower_halves(pictures))]
        return {_MATCH: (nearest == target).flatten(1).all(1).numpy()}  # by pixels: two pairs can be equal

    verdict = classified if kind == "style" else matched
    results, best_drawings = _generate(pipe, captions, verdict, settings, prompt_tokens, progress)
    if kind == "style":
        results["real lower halves"] = classified(pairs.pictures[targets], range(len(targets)))
    title, chance = f"held-out pairs, {kind}", _chance(classifier) if kind == "style" else {_MATCH: 1 / len(of_kind)}
    return IconResult(title, captions, subjects, results, chance, best_drawings, _metadata(pipe, settings))


def accuracy(classifier: IconClassifier, icons: Icons) -> dict[str, float]:
    """Return the accuracy of the classifier on its training data, all real pictures."""
    references = icons.references
    verdicts = _verdicts(classifier.classify(references.pictures), references.families, icons.styles)
    return {respect: float(right.mean()) for respect, right in verdicts.items()}


def enlarge_middle(halves: Tensor) -> Tensor:
    """Return the middle squares of uint8 [B, 3, h, 2h], enlarged to uint8 [B, 3, 2h, 2h]."""
    h = halves.shape[2]
    middle = halves[..., h // 2 : h // 2 + h].float()
    return F.interpolate(middle, (2 * h, 2 * h), mode="bilinear").round().to(torch.uint8)


def _lower_halves(pictures: Tensor) -> Tensor:
    """Return the lower halves of [B, 3, H, W], a view [B, 3, H/2, W]."""
    return pictures[:, :, pictures.shape[2] // 2 :]


def _generate(
    pipe: TextToImage,
    captions: Sequence[str],
    verdict: Callable[[Tensor, Sequence[int]], Verdicts],
    settings: IconSettings,
    prompt_tokens: Tensor | None = None,
    progress: Advance | None = None,
) -> tuple[dict[str, Verdicts], Tensor]:
    """Return verdicts on the best drawings and on all candidates, and the best drawings, uint8 [B, 3, H, W]; `verdict`
    takes pictures and the indices of their captions."""
    n = settings.candidates
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


def _verdicts(labels: tuple[Sequence[str], Sequence[str]], subjects: Sequence[str], styles: Sequence[str]) -> Verdicts:
    """Compare labels (subjects, styles) with the captions' subjects and styles."""
    subject, style = (np.array(a) == np.array(b) for a, b in zip(labels, (subjects, styles), strict=True))
    return {_SUBJECT_AND_STYLE: subject & style, "subject": subject, "style": style}


def _chance(classifier: IconClassifier) -> dict[str, float]:
    subject, style = 1 / len(classifier.subjects), 1 / len(classifier.styles)
    return {_SUBJECT_AND_STYLE: subject * style, "subject": subject, "style": style}


def _sample(indices: list[int], settings: IconSettings) -> list[int]:
    n = min(settings.captions, len(indices))
    return sorted(np.random.default_rng(settings.seed).choice(indices, n, replace=False).tolist())


def _image(picture: Tensor) -> Image.Image:
    return Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy())


def _metadata(pipe: TextToImage, settings: IconSettings) -> dict[str, Any]:
    return {"model": pipe.name, **vars(settings)}
