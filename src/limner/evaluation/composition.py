"""Share of drawings of scenes that show everything in their caption.

Captions whose attribute combinations were held out of training (or training captions, for comparison) are drawn with
many candidates each. A scene parser without learned parts (`tasks/verify.py`) checks each candidate. A drawing is
right if everything in the caption is: the number of objects, the size, fill, color and shape of each, their relation,
the background.

*Best of k* is the result for a user who draws k candidates: the one of the first k with the highest score
(`Drawing.score`). *Any of k* is the result of a perfect reranker: any of the first k is right. Both come from one
set of drawings. The gain of a larger k is a paired difference over captions.

Held-out captions share 30 held-out combinations, so intervals are clustered by combination (`confidence.py`).

Pairs are drawn with the upper half as a prompt (Ramesh et al. 2021, Figure 14). A drawing is right if it keeps the
upper half and its lower half shows the transform that the caption names, for example upside down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from limner.evaluation.confidence import TEST_SEEDS_FROM, drawing_seed, paired_difference, proportion
from limner.evaluation.generate_batches import Predicate, attribute_key, generate_batches, verdicts
from limner.evaluation.result import EvalResult
from limner.pipeline import TextToImage
from limner.progress import Advance
from limner.sampling.generation_config import CANDIDATES, Sampler
from limner.tasks import captions, scenes
from limner.tasks.rendering import render_pair
from limner.tasks.scenes import Scene, ScenePair, Split
from limner.tasks.verify import pair_holds, satisfies
from limner.validation import SEEDS, Validated

__all__ = [
    "CaptionCase",
    "CompositionSettings",
    "composition_results",
    "pair_cases",
    "sample_captions",
    "sample_pairs",
    "scene_cases",
    "score",
]


def sample_captions(
    split: Split = "held-out", counts: Sequence[int] = (1, 2), n: int = 1_024, seed: int = TEST_SEEDS_FROM
) -> list[tuple[str, Scene]]:
    """Sample `n` captions, each with a matching scene; object counts cycle through `counts`.

    Captions are full: they name all sizes and the background. Caption i depends only on the seed and i.
    """
    captioned = []
    for i in range(n):
        rng = np.random.default_rng([seed, i])
        scene = scenes.sample_scene(rng, count=counts[i % len(counts)], split=split)
        while not _is_full(caption := captions.describe(scene, rng)):
            pass
        captioned.append((caption, scene))
    return captioned


def sample_pairs(split: Split = "held-out", n: int = 1_024, seed: int = TEST_SEEDS_FROM) -> list[tuple[str, ScenePair]]:
    """Sample `n` pairs with a caption each. Pair i depends only on the seed and i."""
    captioned = []
    for i in range(n):
        rng = np.random.default_rng([seed, i])
        pair = scenes.sample_pair(rng, split=split)
        captioned.append((captions.describe_pair(pair, rng), pair))
    return captioned


def _is_full(caption: str) -> bool:
    claims = captions.parse(caption)
    assert claims is not None, caption
    return claims.background is not None and all(None not in attributes for attributes in claims.attributes)


@dataclass(frozen=True, kw_only=True)
class CompositionSettings(Validated):
    """Settings of the generation.

    Args:
        candidates: drawings per caption.
        best_of: values of k to report in addition to `candidates`; larger values are ignored.
        seed: caption i uses `drawing_seed(seed, i)`, so that captions have independent noise.
    """

    candidates: Annotated[int, CANDIDATES] = 64
    best_of: Annotated[tuple[int, ...], CANDIDATES] = (1, 8, 64)
    seed: Annotated[int, SEEDS] = 0
    sampler: Sampler = Sampler()


class CaptionCase(NamedTuple):
    """A caption to draw."""

    caption: str
    kind: str  # group in the tables, such as "2 objects" or "upside down"
    cluster: str  # attribute combination
    shows: Predicate
    prompt: Tensor | None = None  # image tokens to continue, [1, S]


def scene_cases(captions: Sequence[tuple[str, Scene]]) -> list[CaptionCase]:
    """Return the cases of captions with their scenes; a kind is a number of objects."""
    cases = []
    for caption, scene in captions:
        kind = f"{len(scene.objects)} object{'s' if len(scene.objects) > 1 else ''}"
        cases.append(CaptionCase(caption, kind, attribute_key(scene), partial(satisfies, caption=caption)))
    return cases


def pair_cases(pipe: TextToImage, pairs: Sequence[tuple[str, ScenePair]]) -> list[CaptionCase]:
    """Return the cases of lower halves to draw below the real upper halves; a kind is a transform."""
    cases, size, rows = [], pipe.dvae.config.size, pipe.dvae.config.grid[0] // 2
    for caption, pair in pairs:
        cluster = attribute_key(*filter(None, (pair.top, pair.bottom)))
        prompt = pipe.prime(Image.fromarray(render_pair(pair, size)), keep_rows=rows)
        cases.append(CaptionCase(caption, pair.transform, cluster, partial(pair_holds, pair), prompt))
    return cases


def score(
    pipe: TextToImage,
    cases: Sequence[CaptionCase],
    settings: CompositionSettings,
    *,
    progress: Advance | None = None,
    on_drawn: Callable[..., object] | None = None,
) -> list[EvalResult]:
    """Draw every case, check every candidate, and return the results for all cases and for each kind.

    `on_drawn` is called with the index of each case and its candidates: pictures uint8 [N, 3, H, W], scores [N],
    verdicts [N].
    """
    right = np.zeros((len(cases), settings.candidates), bool)
    scores = np.zeros(right.shape, np.float32)
    captions, prompts = [case.caption for case in cases], [case.prompt for case in cases if case.prompt is not None]
    for part, batch in generate_batches(
        pipe, captions, settings.candidates, settings.seed, settings.sampler, torch.cat(prompts) if prompts else None,
        progress,
    ):  # fmt: skip
        scores[part.start : part.stop] = batch.scores.numpy()
        for i, pictures in zip(part, batch.pictures, strict=True):
            right[i] = verdicts(pictures, cases[i].shows)
            if on_drawn:
                on_drawn(i, pictures, scores[i], right[i])
    return composition_results(pipe, cases, right, scores, settings)


def composition_results(
    pipe: TextToImage,
    cases: Sequence[CaptionCase],
    right: np.ndarray,
    scores: np.ndarray,
    settings: CompositionSettings,
) -> list[EvalResult]:
    """Return the results for all cases, and for each kind if there are several, from the verdicts on their candidates,
    bool [B, N], and their scores [B, N]."""
    ks = sorted({k for k in (*settings.best_of, settings.candidates) if k <= settings.candidates})
    best = {k: np.take_along_axis(right, scores[:, :k].argmax(1)[:, None], 1)[:, 0] for k in ks}
    values = {"any candidate": right.mean(1)}
    for k in ks:
        values |= {f"best of {k}": best[k], f"any of {k}": np.any(right[:, :k], 1)}
    details = [
        {
            "caption": case.caption, "kind": case.kind, "combination": case.cluster,
            "seed": drawing_seed(settings.seed, i), "right": np.flatnonzero(right[i]).tolist(),
            "scores": [round(float(value), 5) for value in scores[i]],
            "values": {row: float(of_case[i]) for row, of_case in values.items()},
        }
        for i, case in enumerate(cases)
    ]  # fmt: skip
    sampler = settings.sampler.with_defaults(pipe.defaults.sampler)
    metadata = {
        "model": pipe.name, "candidates": settings.candidates, "seed": settings.seed, **sampler.to_metadata(),
        "best_of": ks,
    }  # fmt: skip
    kinds = sorted({case.kind for case in cases})
    results = []
    for group in ("all", *(kinds if len(kinds) > 1 else ())):
        part = [i for i, case in enumerate(cases) if group in ("all", case.kind)]
        clusters = [cases[i].cluster for i in part]
        rows = {row: proportion(of_case[part], clusters) for row, of_case in values.items()}
        for k, more in pairwise(ks):
            rows[f"best of {more} minus best of {k}"] = paired_difference(best[more][part], best[k][part], clusters)
        results.append(
            EvalResult(
                title=f"{group}, {len(part):,} captions of {len(set(clusters)):,} combinations",
                rows={name: {"right": estimate} for name, estimate in rows.items()},
                cases=[details[i] for i in part] if group == "all" else (),
                settings=metadata,
            )
        )
    return results
