"""Cached tokens together with those of a related picture, which a prior is to follow (`models/condition.py`).

Pictures are related if their metadata agree, for example in the subject of an icon, or in subject and set.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from limner.data.datasets import CaptionEncoding, TokenDataset
from limner.data.sample import Rejected, parse_captions
from limner.errors import UserError
from limner.text import PAD

__all__ = ["Related", "RelatedTokenDataset"]

SAME = "same"  # metadata key of captions that need the related picture, such as "the same, filled"


@dataclass(frozen=True)
class Related:
    """Pictures to choose from.

    Args:
        tokens: of M pictures, [M, S].
        metadata: of these pictures, [M].
        keys: names of metadata, most general first. Pictures that agree in the first k of them are related; k is
            chosen at random for each sample.
        share: probability that a sample has a related picture, if there is one.
    """

    tokens: np.ndarray
    metadata: Sequence[Mapping[str, Any]]
    keys: Sequence[str]
    share: float

    def groups(self) -> dict[tuple[str, ...], np.ndarray]:
        """Return the rows of the pictures that agree in the first keys, by their values."""
        rows = defaultdict[tuple[str, ...], list[int]](list)
        for row, meta in enumerate(self.metadata):
            for values in self.values(meta):
                rows[values].append(row)
        return {values: np.array(group) for values, group in rows.items()}

    def values(self, meta: Mapping[str, Any]) -> list[tuple[str, ...]]:
        """Return the values of the first key, of the first two, ...; none if the metadata lack a key."""
        known = [str(meta[key]) for key in self.keys if key in meta]
        return [tuple(known[: k + 1]) for k in range(len(known))] if len(known) == len(self.keys) else []


def _same(value: Any) -> tuple[str, ...]:
    """Return the captions under the key "same" of the metadata; none if they are unusable."""
    try:
        return parse_captions(value)
    except Rejected:
        return ()


class RelatedTokenDataset(TokenDataset):
    """A `TokenDataset` whose samples may have a related picture.

    Args:
        metadata: of the N samples. Captions under the key "same" are used for samples with a related picture, half of
            the time.
        is_training: the samples are the pictures of `related` themselves. A picture is not related to itself.

    Raises `UserError` if no two pictures of `related` agree.
    """

    def __init__(
        self,
        tokens: np.ndarray | Tensor,
        captions: Sequence[Sequence[str]],
        text: CaptionEncoding,
        metadata: Sequence[Mapping[str, Any]],
        related: Related,
        is_training: bool,
    ) -> None:
        self.same = [_same(meta.get(SAME)) for meta in metadata]
        super().__init__(tokens, [(*a, *b) for a, b in zip(captions, self.same, strict=True)], text)
        self.captions, self.related, self.is_training = captions, related, is_training
        groups = related.groups()
        if all(len(group) == 1 for group in groups.values()):
            names = " and ".join(related.keys)
            raise UserError(f"no two pictures agree in the metadata {names}: name other keys in related_by")
        self.groups = [[groups[v] for v in related.values(meta) if v in groups] for meta in metadata]

    def batch(self, indices: np.ndarray, seeds: np.ndarray) -> dict[str, Tensor]:
        """Return {"text": Long [B, T], "image": Long [B, S], "given": Long [B, S]}, all PAD without a picture."""
        image = torch.from_numpy(self.tokens[indices].astype(np.int64))
        given, captions, rngs = torch.full_like(image, PAD), list[str | None](), list[np.random.Generator]()
        for row, (index, seed) in enumerate(zip(indices.tolist(), seeds.tolist(), strict=True)):
            i, rng = int(index), np.random.default_rng(seed)
            phrasings = self.captions[i]
            if (picture := self._choose(i, rng)) is not None:
                given[row] = torch.from_numpy(self.related.tokens[picture].astype(np.int64))
                if self.same[i] and rng.random() < 0.5:
                    phrasings = self.same[i]
            captions.append(self.text.choose(phrasings, rng))
            rngs.append(rng)
        return {"text": self.text.encode(captions, rngs), "image": image, "given": given}

    def _choose(self, i: int, rng: np.random.Generator) -> int | None:
        """Return the row of a picture that is related to sample i, or None."""
        groups = [group for group in self.groups[i] if len(group) > self.is_training]
        if not groups or rng.random() >= self.related.share:
            return None
        group = groups[int(rng.integers(len(groups)))]
        row = int(group[int(rng.integers(len(group) - self.is_training))])
        return int(group[-1]) if self.is_training and row == i else row
