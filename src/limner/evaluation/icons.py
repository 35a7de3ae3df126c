"""The share of drawings of icons that show the subject and the style that their caption names.

A data set of icons (`limner data icons`) has the same subjects in several styles. Some combinations of subject and
style are held out, and some subjects in all styles. The model draws their captions, and captions of training for
comparison, and a classifier that was trained on all real pictures (`icon_classifier.py`) reads subject and style of
each drawing. For comparison there are

- the nearest of all real pictures by squared error, in place of the judge;
- copies in place of drawings of held-out combinations: the training picture of the subject in the nearest style.
  The distance of two styles is the mean squared error between their pictures of the subjects that training has in both;
- real pictures in place of drawings, and real pictures reconstructed by the model's dVAE: these are ceilings.

A held-out pair is drawn with its real upper half given (Ramesh et al. 2021, Figure 14), tokenized above an empty lower
half. Where the lower half is to be in another style, it is cut out, enlarged and read by the judge. For other kinds of
pairs ("upside down", say) the lower half is compared with the real lower halves of all held-out pairs of that kind; it
is right if its own is the nearest.

Drawings that differ in skin tone alone count as one subject.
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

from limner.evaluation.confidence import PUBLISHED
from limner.evaluation.generate_batches import drawn
from limner.evaluation.icon_classifier import Judge
from limner.evaluation.icon_pictures import SPLITS, Icons
from limner.evaluation.icon_result import IconResult, Verdicts
from limner.evaluation.nearest_neighbor import nearest_picture
from limner.evaluation.reconstruction import reconstructions
from limner.pipeline import TextToImage
from limner.progress import Advance
from limner.sampling.generation_config import CANDIDATES
from limner.sampling.rerank import best
from limner.validation import SEEDS, Checked, Range

_ALL = "subject and style"
_RIGHT = "right"


@dataclass(frozen=True, kw_only=True)
class IconSettings(Checked):
    """How an evaluation draws.

    Args:
        captions: at most so many captions of each split, and pairs of each kind, chosen at random.
        candidates: drawings of each caption, of which the best is chosen.
        repeats: how many times each caption is drawn with so many candidates.
        seed: caption i is drawn with `drawing_seed(seed, i)`.
    """

    captions: Annotated[int, Range(1, 10**6)] = 256
    candidates: Annotated[int, CANDIDATES] = 16
    repeats: Annotated[int, Range(1, 1_000)] = 1
    seed: Annotated[int, SEEDS] = PUBLISHED


def evaluate(
    pipe: TextToImage,
    icons: Icons,
    judge: Judge,
    split: str,
    settings: IconSettings = IconSettings(),
    progress: Advance | None = None,
) -> IconResult:
    """Draw captions of a split and have the judge read the drawings."""
    gallery, styles = icons.gallery, icons.styles
    wanted = gallery.choose(split, settings.captions, settings.seed) * settings.repeats
    captions, subjects = [gallery.captions[w] for w in wanted], [gallery.families[w] for w in wanted]

    def verdict(pictures: Tensor, cases: Sequence[int]) -> Verdicts:
        return _verdicts(judge.read(pictures), [subjects[i] for i in cases], [styles[wanted[i]] for i in cases])

    def shown(found: Sequence[int | None]) -> Verdicts:
        """The verdicts on real pictures in place of drawings; where there is none, it is wrong."""
        pictures = gallery.pictures[[0 if i is None else i for i in found]]
        there = np.array([i is not None for i in found])
        return {respect: right & there for respect, right in verdict(pictures, range(len(found))).items()}

    figures, chosen = _drawn(pipe, captions, verdict, settings, progress=progress)
    near = nearest_picture(gallery.pictures, chosen).tolist()
    read = [gallery.families[i] for i in near], [styles[i] for i in near]
    figures[f"best of {settings.candidates}, nearest picture"] = _verdicts(read, subjects, [styles[w] for w in wanted])
    if split == "combination":
        figures["copied from the nearest style"] = shown(icons.copies(wanted))
    figures["real pictures"] = shown(wanted)
    rebuilt = [again.cpu() for *_, again in reconstructions(pipe.dvae, gallery.pictures[wanted])]
    figures["real pictures, through the dVAE"] = verdict(torch.cat(rebuilt), range(len(wanted)))
    return IconResult(
        SPLITS.get(split, split), captions, subjects, figures, _chance(judge), chosen, _facts(pipe, settings)
    )


def evaluate_pairs(
    pipe: TextToImage,
    icons: Icons,
    judge: Judge,
    kind: str,
    settings: IconSettings = IconSettings(),
    progress: Advance | None = None,
) -> IconResult:
    """Draw the lower halves of held-out pairs of a kind, their real upper halves given."""
    pairs = icons.pairs
    mine = [i for i, name in enumerate(pairs.kinds) if name == kind]
    wanted = _some(mine, settings) * settings.repeats
    captions, subjects = [pairs.captions[w] for w in wanted], [pairs.subjects[w] for w in wanted]
    keep = f"top:{pipe.dvae.config.grid[0] // 2}"
    tops = pairs.pictures[wanted]
    _below(tops)[:] = tops[:, :, :1, :1]  # the background: an encoder may look below, and must not see the answer
    given = torch.cat([pipe.given(_image(top), keep=keep) for top in tops])
    real = _below(pairs.pictures[mine])

    def judged(pictures: Tensor, cases: Sequence[int]) -> Verdicts:
        read = judge.read(enlarged(_below(pictures)))
        return _verdicts(read, [subjects[i] for i in cases], [pairs.styles[wanted[i]] for i in cases])

    def matched(pictures: Tensor, cases: Sequence[int]) -> Verdicts:
        own = _below(pairs.pictures[[wanted[i] for i in cases]])
        found = real[nearest_picture(real, _below(pictures))]
        return {_RIGHT: (found == own).flatten(1).all(1).numpy()}  # equal pictures count, which two pairs may have

    of_style = kind == "style"
    figures, chosen = _drawn(pipe, captions, judged if of_style else matched, settings, given, progress)
    if of_style:
        figures["real lower halves"] = judged(pairs.pictures[wanted], range(len(wanted)))
    chance = _chance(judge) if of_style else {_RIGHT: 1 / len(mine)}
    return IconResult(f"held-out pairs, {kind}", captions, subjects, figures, chance, chosen, _facts(pipe, settings))


def accuracy(judge: Judge, icons: Icons) -> dict[str, float]:
    """The share of all real pictures that the judge, who was trained on them, reads right."""
    gallery = icons.gallery
    verdicts = _verdicts(judge.read(gallery.pictures), gallery.families, icons.styles)
    return {respect: float(right.mean()) for respect, right in verdicts.items()}


def enlarged(halves: Tensor) -> Tensor:
    """The middle squares of uint8 [B, 3, h, 2h], as pictures uint8 [B, 3, 2h, 2h]."""
    h = halves.shape[2]
    middle = halves[..., h // 2 : h // 2 + h].float()
    return F.interpolate(middle, (2 * h, 2 * h), mode="bilinear").round().to(torch.uint8)


def _below(pictures: Tensor) -> Tensor:
    """[B, 3, H, W] -> the lower halves [B, 3, H/2, W]."""
    return pictures[:, :, pictures.shape[2] // 2 :]


def _drawn(
    pipe: TextToImage,
    captions: Sequence[str],
    verdict: Callable[[Tensor, Sequence[int]], Verdicts],
    settings: IconSettings,
    given: Tensor | None = None,
    progress: Advance | None = None,
) -> tuple[dict[str, Verdicts], Tensor]:
    """The verdicts on the best drawings and the shares of all candidates that are right; the best drawings, uint8
    [B, 3, H, W]. `verdict` is called with pictures and the indices of their captions."""
    n = settings.candidates
    chosen, right, picks = [], dict[str, list[np.ndarray]](), []
    for part, made in drawn(pipe, captions, n, settings.seed, given=given, progress=progress):
        picks.append(best(made.scores, 1)[:, 0])
        chosen.append(made.pictures[torch.arange(len(part)), picks[-1]])
        found = verdict(made.pictures.flatten(0, 1), [i for i in part for _ in range(n)])
        for respect, values in found.items():
            right.setdefault(respect, []).append(values.reshape(len(part), n))
    every = {respect: np.concatenate(parts) for respect, parts in right.items()}
    pick = torch.cat(picks).numpy()[:, None]
    first = {respect: np.take_along_axis(values, pick, 1)[:, 0] for respect, values in every.items()}
    figures = {f"best of {n}": first, "any candidate": {respect: values.mean(1) for respect, values in every.items()}}
    return figures, torch.cat(chosen)


def _verdicts(read: tuple[Sequence[str], Sequence[str]], subjects: Sequence[str], styles: Sequence[str]) -> Verdicts:
    """Whether the subjects and styles that were read are the wanted ones."""
    subject, style = (np.array(a) == np.array(b) for a, b in zip(read, (subjects, styles), strict=True))
    return {_ALL: subject & style, "subject": subject, "style": style}


def _chance(judge: Judge) -> dict[str, float]:
    subject, style = 1 / len(judge.subjects), 1 / len(judge.styles)
    return {_ALL: subject * style, "subject": subject, "style": style}


def _some(which: list[int], settings: IconSettings) -> list[int]:
    n = min(settings.captions, len(which))
    return sorted(np.random.default_rng(settings.seed).choice(which, n, replace=False).tolist())


def _image(picture: Tensor) -> Image.Image:
    return Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy())


def _facts(pipe: TextToImage, settings: IconSettings) -> dict[str, Any]:
    return {"model": pipe.name, **vars(settings)}
