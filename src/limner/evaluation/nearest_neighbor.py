"""Nearest real picture to a drawing: a score for data without a scene parser, such as emoji.

The best of N drawings of a caption is compared with *every* real picture by mean squared error over pixels. The drawing
is right if the nearest picture is the one of the caption, and related if it is of the same family (another skin tone or
gender). With M real pictures a uniform guess is right with probability 1 / M.

Captions can be few, so each may be drawn several times. Intervals are clustered by family (`confidence.py`): they cover
other families of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from limner.data.datasets import ImageCaptionDataset
from limner.data.sample import Source
from limner.evaluation.confidence import TEST_SEEDS_FROM, Estimate, proportion
from limner.evaluation.generate_batches import generate_batches, to_image
from limner.evaluation.report import SheetRow
from limner.evaluation.result import EvalResult, Verdicts
from limner.pipeline import TextToImage
from limner.progress import Advance
from limner.sampling.generation_config import CANDIDATES
from limner.sampling.rerank import best
from limner.validation import SEEDS, Range, Validated


@dataclass(frozen=True, kw_only=True)
class ReferenceSettings(Validated):
    """Settings of drawings that are compared with real pictures.

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


@dataclass(frozen=True)
class ReferenceSet:
    """M real pictures with their labels."""

    pictures: Tensor  # uint8 [M, 3, H, W]
    captions: list[str]  # first caption of each, [M]
    keys: list[str]  # identity of each, [M]; pictures of one key show the same subject
    families: list[str]  # [M]
    splits: list[str]  # [M]

    @staticmethod
    def from_source(source: Source, size: int) -> ReferenceSet:
        """Read a whole source of emoji at `size` pixels per side, without the samples that cannot be read."""
        indices, pictures, captions, _ = ImageCaptionDataset(source, size).load(np.arange(len(source)))
        metadata = [source.meta(int(i)) for i in indices]
        keys = [str(meta.get("emoji", i)) for i, meta in zip(indices, metadata, strict=True)]
        return ReferenceSet(
            pictures,
            [phrasings[0] for phrasings in captions],
            keys,
            [str(meta.get("family", key)) for key, meta in zip(keys, metadata, strict=True)],
            [str(meta.get("split", "train")) for meta in metadata],
        )

    def split_indices(self, split: str, n: int | None = None, seed: int = 0) -> list[int]:
        """Return the indices of `n` random pictures of a split, by default of all of them."""
        indices = [i for i, name in enumerate(self.splits) if name == split]
        if n is not None and n < len(indices):
            indices = sorted(np.random.default_rng(seed).choice(indices, n, replace=False).tolist())
        return indices

    def targets(self, split: str, settings: ReferenceSettings) -> list[int]:
        """Return the index of the real picture of each drawing."""
        return self.split_indices(split, settings.captions, settings.seed) * settings.repeats


def nearest_picture(real: Tensor, pictures: Tensor) -> Tensor:
    """Return the index of the nearest real picture by squared error: uint8 [M, 3, H, W], [B, 3, H, W] -> [B]."""
    drawings = pictures.flatten(1).float() / 255
    # |a - b|^2 = |a|^2 - 2 ab + |b|^2, where |a|^2 does not change the order
    distance = [(b := part.float() / 255).square().sum(1) - 2 * drawings @ b.T for part in real.flatten(1).split(1024)]
    return torch.cat(distance, 1).argmin(1)


def draw_and_compare(
    pipe: TextToImage,
    references: ReferenceSet,
    targets: Sequence[int],
    verdict: Callable[[Tensor, Sequence[int]], Verdicts],
    settings: ReferenceSettings,
    progress: Advance | None,
    prompt_tokens: Tensor | None = None,
) -> tuple[dict[str, Verdicts], Tensor]:
    """Draw the captions of `targets`. Return verdicts on the best drawings and on all candidates by row of the table,
    and the best drawings, uint8 [B, 3, H, W].

    `verdict` takes pictures and the target of each.
    """
    n, captions = settings.candidates, [references.captions[t] for t in targets]
    batches = generate_batches(pipe, captions, n, settings.seed, prompt_tokens=prompt_tokens, progress=progress)
    drawings, picks, verdicts = [], [], []
    for part, batch in batches:
        picks.append(best(batch.scores, 1))
        drawings.append(batch.pictures[torch.arange(len(part)), picks[-1][:, 0]])
        verdicts.append(verdict(batch.pictures.flatten(0, 1), [targets[i] for i in part for _ in range(n)]))
    pick = torch.cat(picks).numpy()
    right = {respect: np.concatenate([v[respect] for v in verdicts]).reshape(-1, n) for respect in verdicts[0]}
    first = {respect: np.take_along_axis(values, pick, 1)[:, 0] for respect, values in right.items()}
    shares = {respect: values.mean(1) for respect, values in right.items()}
    return {f"best of {n}": first, "any candidate": shares}, torch.cat(drawings)


def comparison_result(
    name: str,
    pipe: TextToImage,
    references: ReferenceSet,
    targets: Sequence[int],
    settings: ReferenceSettings,
    verdicts: Mapping[str, Verdicts],
    chance: Mapping[str, float],
    sheet: Sequence[SheetRow] = (),
) -> EvalResult:
    """Return the result of drawings of `targets`: the share of right cases for each row and respect, with intervals
    over subjects, which are families. `chance` is the probability that a guess is right, by respect."""
    subjects = [references.families[t] for t in targets]
    rows = {
        row: {respect: proportion(values, subjects) for respect, values in by_respect.items()}
        for row, by_respect in verdicts.items()
    }
    rows["chance"] = {respect: Estimate(value=value, spec=".2%") for respect, value in chance.items()}
    cases = [
        {
            "caption": references.captions[t], "subject": references.families[t],
            **{row: {key: round(float(v[i]), 4) for key, v in by.items()} for row, by in verdicts.items()},
        }
        for i, t in enumerate(targets)
    ]  # fmt: skip
    captions = len(targets) // settings.repeats  # not the distinct ones: two pairs can have the same caption
    times = f", drawn {settings.repeats} times" if settings.repeats > 1 else ""
    return EvalResult(
        title=f"{name}, {captions:,} captions of {len(set(subjects)):,} subjects{times}",
        rows=rows, cases=cases, settings={"model": pipe.name, **vars(settings)}, sheet=sheet,
    )  # fmt: skip


def sheet_rows(references: ReferenceSet, targets: Sequence[int], drawings: Tensor, right: np.ndarray) -> list[SheetRow]:
    """Return each drawing next to the real picture of its target: uint8 [B, 3, H, W], verdicts [B]."""
    return [
        SheetRow(
            caption=references.captions[t], right=bool(verdict),
            pictures=[(to_image(drawing), "drawn"), (to_image(references.pictures[t]), "real")],
        )
        for t, drawing, verdict in zip(targets, drawings, right, strict=True)
    ]  # fmt: skip


def evaluate(
    pipe: TextToImage,
    references: ReferenceSet,
    split: str,
    settings: ReferenceSettings = ReferenceSettings(),
    progress: Advance | None = None,
) -> list[EvalResult]:
    """Draw captions of a split that is not empty, and find the nearest real picture of each drawing."""
    targets, n = references.targets(split, settings), settings.candidates
    keys, families = np.array(references.keys, object), np.array(references.families, object)

    def verdict(pictures: Tensor, targets: Sequence[int]) -> Verdicts:
        nearest = nearest_picture(references.pictures, pictures).numpy()
        right = keys[nearest] == keys[targets]
        return {"right picture": right, "or a variant": right | (families[nearest] == families[targets])}

    verdicts, drawings = draw_and_compare(pipe, references, targets, verdict, settings, progress)
    sheet = sheet_rows(references, targets, drawings, verdicts[f"best of {n}"]["right picture"])
    chance = {"right picture": 1 / len(references.keys)}
    result = comparison_result(split, pipe, references, targets, settings, verdicts, chance, sheet)
    nearest = nearest_picture(references.pictures, drawings).tolist()
    cases = [{**case, "nearest": references.captions[i]} for case, i in zip(result.cases, nearest, strict=True)]
    return [replace(result, cases=cases)]
