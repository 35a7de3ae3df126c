"""The share of drawings that show what their caption says, by the oracle of the scenes world.

Captions of scenes whose attribute combinations were held out of training (or of training scenes, for
comparison) are drawn with many candidates each. A drawing is right if *everything* in the caption is:
the number of things, and for each its size, fill, color and shape, their relation, the background.

"Best of k" is what a user gets who asks for k candidates: the one of the first k with the highest score
(`Drawing.score`). The *ceiling* is what a perfect reranker would get: any of the first k is right. Both come
from one set of drawings. The gain of a larger k is computed caption by caption.

Held-out captions share the 30 combinations that are held out, so intervals are over combinations (see
`confidence.py`).

Pairs are asked with the upper half given (Ramesh et al. 2021, Figure 14): a right drawing leaves it as it
is and shows below what the caption says of it, upside down, say, with every thing in its place.
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
from limner.evaluation.confidence import PUBLISHED, Gain, Rate, drawing_seed
from limner.evaluation.generate_batches import Holds, combination, drawn, verdicts
from limner.json_files import read_json, write_json
from limner.pipeline import Candidates, TextToImage
from limner.progress import Advance
from limner.sampling.generation_config import CANDIDATES, Sampler
from limner.tasks import captions, scenes
from limner.tasks.rendering import render_pair
from limner.tasks.scenes import Pair, Scene, Split
from limner.tasks.verify import pair_holds, satisfies
from limner.validation import SEEDS, Checked


def captions_for(
    split: Split = "held-out", counts: Sequence[int] = (1, 2), n: int = 1_024, seed: int = PUBLISHED
) -> list[tuple[str, Scene]]:
    """`n` captions with a scene of each, the numbers of things taken in turn.

    Captions are full: they say all sizes and the background. Caption i depends on the seed and i alone.
    """
    found = []
    for i in range(n):
        rng = np.random.default_rng([seed, i])
        scene = scenes.sample_scene(rng, count=counts[i % len(counts)], split=split)
        while not _full(caption := captions.describe(scene, rng)):
            pass
        found.append((caption, scene))
    return found


def pairs_for(split: Split = "held-out", n: int = 1_024, seed: int = PUBLISHED) -> list[tuple[str, Pair]]:
    """`n` pairs with a caption each. Pair i depends on the seed and i alone."""
    found = []
    for i in range(n):
        rng = np.random.default_rng([seed, i])
        pair = scenes.sample_pair(rng, split=split)
        found.append((captions.describe_pair(pair, rng), pair))
    return found


def _full(caption: str) -> bool:
    claims = captions.parse(caption)
    assert claims is not None, caption
    return claims.background is not None and all(None not in look for look in claims.looks)


@dataclass(frozen=True)
class Composition:
    """The verdicts of one evaluation.

    Attributes:
        captions: B captions.
        kinds: of each caption, "2 things" or "upside down", say.
        clusters: of each caption, the combination that it counts for.
        right: bool [B, N], the oracle's verdict on every candidate.
        scores: float32 [B, N], by which the best is chosen.
        settings: how it was drawn.
    """

    captions: list[str]
    kinds: list[str]
    clusters: list[str]
    right: np.ndarray
    scores: np.ndarray
    best_of: tuple[int, ...]
    settings: dict[str, Any]

    def chosen(self, k: int) -> np.ndarray:
        """Index of the candidate that best of k chooses, [B]."""
        return self.scores[:, :k].argmax(1)

    def rate(self, k: int, kind: str | None = None) -> Rate:
        """Best of k, over all captions or those of a kind."""
        return self._rate(self._best(k), kind)

    def ceiling(self, k: int, kind: str | None = None) -> Rate:
        """How often any of the first k is right."""
        return self._rate(np.any(self.right[:, :k], axis=1), kind)

    def single(self, kind: str | None = None) -> Rate:
        """The share of all candidates that are right: best of 1 with less noise."""
        return self._rate(self.right.mean(1), kind)

    def gain(self, k: int, more: int, kind: str | None = None) -> Gain:
        """Best of `more` over best of k."""
        mine = self._where(kind)
        return Gain.of(self._best(more)[mine], self._best(k)[mine], self._clusters(mine))

    def _best(self, k: int) -> np.ndarray:
        return np.take_along_axis(self.right, self.chosen(k)[:, None], 1)[:, 0]

    def _where(self, kind: str | None) -> np.ndarray:
        return np.flatnonzero([kind in (None, other) for other in self.kinds])

    def _clusters(self, which: np.ndarray) -> list[str]:
        return [self.clusters[i] for i in which]

    def _rate(self, verdicts: np.ndarray, kind: str | None) -> Rate:
        mine = self._where(kind)
        return Rate.of(verdicts[mine], self._clusters(mine))

    def groups(self) -> dict[str, str | None]:
        """Rows of the table: all captions, then each kind if there are several."""
        kinds = sorted(set(self.kinds))
        return {"all": None, **{kind: kind for kind in kinds if len(kinds) > 1}}

    def table(self) -> str:
        """For people, in lines of less than 80 columns."""
        lines = []
        for name, kind in self.groups().items():
            mine = self._where(kind)
            lines.append(f"{name}, {len(mine):,} captions of {len(set(self._clusters(mine))):,} combinations")
            lines.append(f"  any candidate {self.single(kind)}")
            for k in self.best_of:
                lines.append(f"  best of {k:<6}{self.rate(k, kind)}, ceiling {self.ceiling(k, kind)}")
            for k, more in pairwise(self.best_of):
                lines.append(f"  best of {more} over best of {k}: {self.gain(k, more, kind)}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """JSON values: the table, the settings, and for each caption the seed it was drawn with, the scores and
        which candidates are right."""
        table = {
            name: {
                "any candidate": self.single(kind).to_dict(),
                **{
                    f"best of {k}": {
                        **self.rate(k, kind).to_dict(),
                        "ceiling": self.ceiling(k, kind).to_dict(),
                    }
                    for k in self.best_of
                },
                **{
                    f"best of {more} over best of {k}": asdict(self.gain(k, more, kind))
                    for k, more in pairwise(self.best_of)
                },
            }
            for name, kind in self.groups().items()
        }
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
        write_json(path, self.to_dict(), ensure_ascii=False)

    @staticmethod
    def load(path: str | Path) -> Composition:
        """What `save` wrote. Raises `UserError` for anything else."""
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
            return Composition(captions, kinds, clusters, right, scores, best_of, settings)
        except (ArithmeticError, LookupError, MemoryError, TypeError, ValueError):
            raise UserError(f"{path} is not the result of an evaluation: delete it") from None


@dataclass(frozen=True, kw_only=True)
class CompositionSettings(Checked):
    """How an evaluation draws.

    Args:
        candidates: drawings of each caption.
        best_of: values of k to report beside `candidates`; those above it are left out.
        seed: caption i is drawn with `drawing_seed(seed, i)`, so that captions are independent.
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
    keep: Callable[[int, Candidates], object] | None = None,
) -> Composition:
    """Draw every caption and let the oracle judge every candidate.

    `keep` is called with (index of the first caption, their candidates) for each part.
    """
    counts = [len(scene.things) for _, scene in captions]
    kinds = [f"{count} thing{'s' if count > 1 else ''}" for count in counts]
    asked = [(caption, partial(satisfies, caption=caption)) for caption, _ in captions]
    clusters = [combination(scene) for _, scene in captions]
    return _judged(pipe, asked, kinds, clusters, settings, progress, keep=keep)


def score_pairs(
    pipe: TextToImage,
    pairs: Sequence[tuple[str, Pair]],
    settings: CompositionSettings,
    *,
    progress: Advance | None = None,
) -> Composition:
    """Draw the lower half of every pair, the upper one given. As `score` otherwise."""
    size, rows = pipe.dvae.config.size, pipe.dvae.config.grid[0] // 2
    tops = [pipe.given(Image.fromarray(render_pair(pair, size)), keep=f"top:{rows}") for _, pair in pairs]
    kinds = [pair.transform for _, pair in pairs]
    asked = [(caption, partial(pair_holds, pair)) for caption, pair in pairs]
    clusters = [combination(*filter(None, (pair.top, pair.bottom))) for _, pair in pairs]
    return _judged(pipe, asked, kinds, clusters, settings, progress, given=torch.cat(tops))


def _judged(
    pipe: TextToImage,
    asked: Sequence[tuple[str, Holds]],
    kinds: Sequence[str],
    clusters: Sequence[str],
    settings: CompositionSettings,
    progress: Advance | None,
    keep: Callable[[int, Candidates], object] | None = None,
    given: Tensor | None = None,
) -> Composition:
    candidates, sampler = settings.candidates, settings.sampler
    right = np.zeros((len(asked), candidates), bool)
    scores = np.zeros((len(asked), candidates), np.float32)
    texts = [caption for caption, _ in asked]
    for part, made in drawn(pipe, texts, candidates, settings.seed, sampler, given, progress):
        for i, pictures in zip(part, made.pictures, strict=True):
            right[i] = verdicts(pictures, asked[i][1])
        scores[part.start : part.stop], sampler = made.scores.numpy(), made.sampler
        if keep:
            keep(part.start, made)
    how = {"model": pipe.name, "candidates": candidates, "seed": settings.seed, **sampler.to_metadata()}
    ks = tuple(sorted({k for k in (*settings.best_of, candidates) if k <= candidates}))
    return Composition(texts, list(kinds), list(clusters), right, scores, ks, how)
