"""Share of drawings of scenes that show everything in their caption.

Captions whose attribute combinations were held out of training (or training captions, for comparison) are drawn with
many candidates each. A scene parser without learned parts (`tasks/verify.py`) checks each candidate. A drawing is
right if everything in the caption is: the number of objects, the size, fill, color and shape of each, their relation,
the background.

*Best of k* is the result for a user who draws k candidates: the one of the first k with the highest score
(`Drawing.score`). The *ceiling* is the result of a perfect reranker: any of the first k is right. Both come from one
set of drawings. The gain of a larger k is a paired difference over captions.

Held-out captions share 30 held-out combinations, so intervals are clustered by combination (`confidence.py`).

Pairs are drawn with the upper half as a prompt (Ramesh et al. 2021, Figure 14). A drawing is right if it keeps the
upper half and its lower half shows the transform that the caption names, for example upside down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from limner.errors import UserError
from limner.evaluation.confidence import TEST_SEEDS_FROM, PairedDifference, Proportion, drawing_seed
from limner.evaluation.generate_batches import Predicate, attribute_key, generate_batches, verdicts
from limner.json_files import read_json, write_json
from limner.pipeline import TextToImage
from limner.progress import Advance
from limner.sampling.engine import Candidates
from limner.sampling.generation_config import CANDIDATES, Sampler
from limner.tasks import captions, scenes
from limner.tasks.rendering import render_pair
from limner.tasks.scenes import Scene, ScenePair, Split
from limner.tasks.verify import pair_holds, satisfies
from limner.validation import SEEDS, Validated

__all__ = ["CompositionResult", "CompositionSettings", "sample_captions", "sample_pairs", "score", "score_pairs"]


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


@dataclass(frozen=True)
class CompositionResult:
    """Verdicts on N candidates of each of B captions.

    Attributes:
        captions: [B].
        kinds: group of each caption, such as "2 objects" or "upside down", [B].
        clusters: attribute combination of each caption, [B].
        right: True if a candidate shows its caption, bool [B, N].
        scores: ranking scores, float32 [B, N].
        best_of: values of k in the table.
        settings: of the generation.
    """

    captions: list[str]
    kinds: list[str]
    clusters: list[str]
    right: np.ndarray
    scores: np.ndarray
    best_of: tuple[int, ...]
    settings: dict[str, Any]

    def rate(self, k: int, kind: str | None = None) -> Proportion:
        """Return the share of captions whose best of k is right; `kind` restricts the captions."""
        return self._proportion(self._best(k), kind)

    def ceiling(self, k: int, kind: str | None = None) -> Proportion:
        """Return the share of captions for which any of the first k candidates is right."""
        return self._proportion(np.any(self.right[:, :k], axis=1), kind)

    def single(self, kind: str | None = None) -> Proportion:
        """Return the share of all candidates that are right: the expectation of best of 1, with less variance."""
        return self._proportion(self.right.mean(1), kind)

    def gain(self, k: int, more: int, kind: str | None = None) -> PairedDifference:
        """Return the difference of best of `more` and best of k."""
        rows, clusters = self._group(kind)
        return PairedDifference.from_values(self._best(more)[rows], self._best(k)[rows], clusters)

    def _best(self, k: int) -> np.ndarray:
        """Return the verdicts on the candidates with the highest score among the first k, bool [B]."""
        chosen = self.scores[:, :k].argmax(1)
        return np.take_along_axis(self.right, chosen[:, None], 1)[:, 0]

    def _group(self, kind: str | None) -> tuple[np.ndarray, list[str]]:
        """Return the indices and the clusters of the captions of a kind, by default of all."""
        rows = np.flatnonzero([kind in (None, other) for other in self.kinds])
        return rows, [self.clusters[i] for i in rows]

    def _proportion(self, verdicts: np.ndarray, kind: str | None) -> Proportion:
        rows, clusters = self._group(kind)
        return Proportion.from_values(verdicts[rows], clusters)

    def groups(self) -> dict[str, str | None]:
        """Return the groups of the table: all captions, then each kind if there are several."""
        kinds = sorted(set(self.kinds))
        return {"all": None, **{kind: kind for kind in kinds if len(kinds) > 1}}

    def table(self) -> str:
        """Format the table in lines of less than 80 columns."""
        lines = []
        for name, kind in self.groups().items():
            rows, clusters = self._group(kind)
            lines.append(f"{name}, {len(rows):,} captions of {len(set(clusters)):,} combinations")
            lines.append(f"  any candidate {self.single(kind)}")
            for k in self.best_of:
                lines.append(f"  best of {k:<6}{self.rate(k, kind)}, ceiling {self.ceiling(k, kind)}")
            for k, more in pairwise(self.best_of):
                lines.append(f"  best of {more} over best of {k}: {self.gain(k, more, kind)}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: table, settings, and for each caption its seed, scores and right candidates."""
        table: dict[str, dict[str, Any]] = {}
        for name, kind in self.groups().items():
            table[name] = {"any candidate": self.single(kind).to_dict()}
            for k in self.best_of:
                table[name][f"best of {k}"] = {
                    **self.rate(k, kind).to_dict(), "ceiling": self.ceiling(k, kind).to_dict()
                }  # fmt: skip
            for k, more in pairwise(self.best_of):
                table[name][f"best of {more} over best of {k}"] = asdict(self.gain(k, more, kind))
        rows = [
            {
                "caption": caption,
                "kind": self.kinds[i],
                "combination": self.clusters[i],
                "seed": drawing_seed(self.settings["seed"], i),
                "right": np.flatnonzero(self.right[i]).tolist(),
                "scores": [round(float(value), 5) for value in self.scores[i]],
            }
            for i, caption in enumerate(self.captions)
        ]
        return {"table": table, "settings": {**self.settings, "best_of": self.best_of}, "captions": rows}

    def save(self, path: str | Path) -> None:
        """Write `to_dict` as JSON."""
        write_json(path, self.to_dict(), ensure_ascii=False)

    @staticmethod
    def load(path: str | Path) -> CompositionResult:
        """Read a file that `save` wrote. Raises `UserError` for any other content."""
        data = read_json(path, 1 << 28)
        try:
            settings, rows = dict(data["settings"]), data["captions"]
            best_of = tuple(settings.pop("best_of"))
            numbers = (settings["candidates"], settings["seed"], *best_of)
            captions, kinds, clusters = ([row[key] for row in rows] for key in ("caption", "kind", "combination"))
            right = np.zeros((len(rows), settings["candidates"]), bool)
            for row, verdicts in zip(rows, right, strict=True):
                verdicts[row["right"]] = True
            scores = np.array([row["scores"] for row in rows], np.float32)
            texts = all(isinstance(text, str) for text in (*captions, *kinds, *clusters))
            if not texts or any(type(n) is not int or n < 0 for n in numbers) or scores.shape != right.shape:
                raise ValueError
            return CompositionResult(captions, kinds, clusters, right, scores, best_of, settings)
        except (ArithmeticError, LookupError, MemoryError, TypeError, ValueError):
            raise UserError(f"{path} is not a result of `limner evaluate composition`: delete it") from None


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


def score(
    pipe: TextToImage,
    captions: Sequence[tuple[str, Scene]],
    settings: CompositionSettings,
    *,
    progress: Advance | None = None,
    on_candidates: Callable[[int, Candidates], object] | None = None,
) -> CompositionResult:
    """Draw every caption and check every candidate.

    `on_candidates` is called with (index of the first caption, candidates) for each batch.
    """
    counts = [len(scene.objects) for _, scene in captions]
    kinds = [f"{count} object{'s' if count > 1 else ''}" for count in counts]
    checks = [(caption, partial(satisfies, caption=caption)) for caption, _ in captions]
    clusters = [attribute_key(scene) for _, scene in captions]
    return _score(pipe, checks, kinds, clusters, settings, progress, on_candidates)


def score_pairs(
    pipe: TextToImage,
    pairs: Sequence[tuple[str, ScenePair]],
    settings: CompositionSettings,
    *,
    progress: Advance | None = None,
) -> CompositionResult:
    """Draw the lower half of every pair with the real upper half as a prompt, and check every candidate."""
    size, rows = pipe.dvae.config.size, pipe.dvae.config.grid[0] // 2
    tops = [pipe.prime(Image.fromarray(render_pair(pair, size)), keep_rows=rows) for _, pair in pairs]
    kinds = [pair.transform for _, pair in pairs]
    checks = [(caption, partial(pair_holds, pair)) for caption, pair in pairs]
    clusters = [attribute_key(*filter(None, (pair.top, pair.bottom))) for _, pair in pairs]
    return _score(pipe, checks, kinds, clusters, settings, progress, prompt_tokens=torch.cat(tops))


def _score(
    pipe: TextToImage,
    checks: Sequence[tuple[str, Predicate]],
    kinds: Sequence[str],
    clusters: Sequence[str],
    settings: CompositionSettings,
    progress: Advance | None,
    on_candidates: Callable[[int, Candidates], object] | None = None,
    prompt_tokens: Tensor | None = None,
) -> CompositionResult:
    candidates, sampler = settings.candidates, settings.sampler
    right = np.zeros((len(checks), candidates), bool)
    scores = np.zeros((len(checks), candidates), np.float32)
    texts = [caption for caption, _ in checks]
    for part, batch in generate_batches(pipe, texts, candidates, settings.seed, sampler, prompt_tokens, progress):
        for i, pictures in zip(part, batch.pictures, strict=True):
            right[i] = verdicts(pictures, checks[i][1])
        scores[part.start : part.stop], sampler = batch.scores.numpy(), batch.sampler
        if on_candidates:
            on_candidates(part.start, batch)
    metadata = {"model": pipe.name, "candidates": candidates, "seed": settings.seed, **sampler.to_metadata()}
    ks = tuple(sorted({k for k in (*settings.best_of, candidates) if k <= candidates}))
    return CompositionResult(texts, list(kinds), list(clusters), right, scores, ks, metadata)
