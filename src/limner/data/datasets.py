"""Data sets: from a source of samples, or from cached tokens, to batches of tensors.

All follow the `Dataset` protocol of `stream.py`: `batch(indices, seeds)` draws all randomness of a
sample from the sample's seed. A sample therefore does not depend on its batch, thread or rank.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from limner.data.augment import get_augment
from limner.data.hard_negative_captions import Distractors, FalsityTest
from limner.data.image_decode import decoded
from limner.data.sample import Rejected, Source, format_reasons
from limner.errors import UserError
from limner.spans import loading
from limner.text import PAD

__all__ = ["CaptionEncoder", "CaptionEncoding", "EncodedDataset", "ImageCaptionDataset", "TokenDataset"]

Rngs = Sequence[np.random.Generator]  # one for each caption


class CaptionEncoder(Protocol):
    """The tokenizer interface that data sets use, as `limner.text.bpe.Tokenizer` has it."""

    def encode(self, captions: Sequence[str], length: int, dropout: float = 0.0, rng: Rngs | None = None) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class CaptionEncoding:
    """The conversion of a caption's phrasings to text tokens.

    Args:
        length: T, text positions.
        bpe_dropout: probability of skipping a merge.
        caption_dropout: probability of an empty text (all padding), as guidance requires.
        distractors: generator of wrong captions for each picture.
    """

    tokenizer: CaptionEncoder
    length: int = 256
    bpe_dropout: float = 0.0
    caption_dropout: float = 0.0
    distractors: Distractors | None = None

    def choose(self, phrasings: Sequence[str], rng: np.random.Generator) -> str | None:
        """Return a random phrasing; None if the caption is dropped."""
        phrasing = phrasings[int(rng.integers(len(phrasings)))]
        return None if rng.random() < self.caption_dropout else phrasing

    def encode(self, captions: Iterable[str | None], rngs: Rngs) -> Tensor:
        """Encode captions to Long [B, T], each with its generator; None becomes all padding."""
        rows = [(row, caption) for row, caption in enumerate(captions) if caption is not None]
        out = torch.full((len(rngs), self.length), PAD)
        if rows:
            indices, texts = map(list, zip(*rows, strict=True))
            out[indices] = self.tokenizer.encode(texts, self.length, self.bpe_dropout, [rngs[row] for row in indices])
        return out


class ImageCaptionDataset:
    """A data set that decodes and augments pictures on demand, and replaces a bad sample by the next good one.

    `augment` is "dvae" (Listing 1), "prior" (Listing 2) or "none" (the central square, resized). With `text`, batches
    hold a random phrasing of each caption, and distractors. `threads` threads decode and resize without the GIL.

    Large JPEGs are decoded at a smaller scale if resizing then still shrinks them at least twofold
    (see `decoded`). With `augment="none"`, if all pictures fit into `cache_bytes` of memory, each is
    decoded once. Raises `UserError` if `source` is empty or `augment` is unknown.
    """

    def __init__(
        self,
        source: Source,
        size: int,
        augment: str = "none",
        text: CaptionEncoding | None = None,
        *,
        threads: int | None = None,
        cache_bytes: int = 0,
    ) -> None:
        if len(source) == 0:
            raise UserError("the data set is empty: give it samples")
        self.source, self.size = source, size
        self.augment, factor = get_augment(augment)
        self.text, self.threads = text, threads or os.cpu_count() or 1
        self._target = max(size, round(factor * size))  # largest side of the resized picture
        self._defects: dict[int, str] = {}
        # One array for all pictures: small arrays among large ones that are freed would fragment the heap.
        caches = augment == "none" and len(source) * 3 * size**2 <= cache_bytes
        self._cached_pixels = np.empty((len(source), 3, size, size), np.uint8) if caches else None
        self._cached_captions: dict[int, tuple[tuple[str, ...], FalsityTest | None]] = {}

    def __len__(self) -> int:
        return len(self.source)

    @property
    def rejected(self) -> Counter[str]:
        """Number of bad samples read so far, by reason; each sample counts once."""
        return Counter(list(self._defects.values()))  # a list, since threads may add defects

    def _read(
        self, index: int, rng: np.random.Generator, out: np.ndarray
    ) -> tuple[tuple[str, ...], FalsityTest | None] | str:
        """Write sample `index`, augmented, into `out` [3, size, size]. Returns its captions and the test for captions
        that are false for it (None if unknown, or without distractors); for a bad sample the reason."""
        if index in self._defects:
            return self._defects[index]
        if self._cached_pixels is not None and index in self._cached_captions:
            out[:] = self._cached_pixels[index]
            return self._cached_captions[index]
        try:
            with loading("read"):
                sample = self.source[index]
            with ExitStack() as memory:
                with loading("decode"):
                    image = memory.enter_context(decoded(sample.image, target=self._target, reuse=True))
                with loading("augment"):
                    out[:] = self.augment(image, self.size, rng).transpose(2, 0, 1)
        except Rejected as rejected:
            self._defects[index] = rejected.reason
            return rejected.reason
        distractors = self.text and self.text.distractors
        result = sample.captions, distractors.falsity_test(sample.meta) if distractors else None
        if self._cached_pixels is not None:
            self._cached_pixels[index] = out
            self._cached_captions[index] = result
        return result

    def _sample(self, index: int, seed: int, out: np.ndarray) -> tuple[int, Any, tuple[str, ...], FalsityTest | None]:
        """Write one training sample into `out`. Returns its index, its generator, and the result of `_read`."""
        n = len(self.source)
        for candidate in ((index + step) % n for step in range(n)):
            rng = np.random.default_rng(seed)
            if not isinstance(result := self._read(candidate, rng, out), str):
                return candidate, rng, *result
        raise UserError(f"none of the {n} samples can be used ({format_reasons(self.rejected)}): check the data")

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.threads, "decode")

    def batch(self, indices: np.ndarray, seeds: np.ndarray) -> dict[str, Tensor]:
        """Return {"pixels": uint8 [B, 3, size, size], "index": Long [B]}, with `text` also {"text": Long [B, T]}, and
        with distractors {"distractors": Long [B, K, T]}, all padding where a caption lacks one.

        "index" names the samples read: the next good one replaces a bad one. Raises `UserError` if all are bad.
        """
        pixels = np.empty((len(indices), 3, self.size, self.size), np.uint8)
        samples = self._pool.map(self._sample, indices.tolist(), seeds.tolist(), pixels)
        read, rngs, phrasings, tests = zip(*samples, strict=True)
        batch = {"pixels": torch.from_numpy(pixels), "index": torch.tensor(read)}
        if self.text is None:
            return batch
        captions = [self.text.choose(*pair) for pair in zip(phrasings, rngs, strict=True)]
        batch["text"] = self.text.encode(captions, rngs)
        if distractors := self.text.distractors:
            negatives = [
                [caption and distractors.make_negative(caption, rng, is_false) for _ in range(distractors.count)]
                for caption, rng, is_false in zip(captions, rngs, tests, strict=True)
            ]
            columns = zip(*negatives, strict=True)
            batch["distractors"] = torch.stack([self.text.encode(column, rngs) for column in columns], 1)
        return batch

    def load(self, indices: np.ndarray) -> tuple[np.ndarray, Tensor, list[tuple[str, ...]], Counter[str]]:
        """Load the good samples among `indices` without replacing bad ones. Returns their indices,
        pixels uint8 [B, 3, size, size], all captions, and the number of bad samples by reason."""
        pixels = np.empty((len(indices), 3, self.size, self.size), np.uint8)
        rngs = [np.random.default_rng(0) for _ in indices]
        results = list(self._pool.map(self._read, indices.tolist(), rngs, pixels))
        good = np.array([not isinstance(result, str) for result in results], bool)
        captions = [result[0] for result in results if not isinstance(result, str)]
        rejected = Counter(result for result in results if isinstance(result, str))
        return indices[good], torch.from_numpy(pixels[good]), captions, rejected

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_pool"}


class TokenDataset:
    """A data set of cached tokens [N, S] and their captions.

    `captions[i]` holds the phrasings of row i, of which `batch` chooses one at random. Without BPE dropout the
    constructor encodes every caption. Raises `ValueError` if the lengths differ.
    """

    def __init__(self, tokens: np.ndarray | Tensor, captions: Sequence[Sequence[str]], text: CaptionEncoding) -> None:
        if len(tokens) != len(captions):
            raise ValueError(f"{len(tokens)} rows of tokens but {len(captions)} of captions")
        self.tokens = tokens.numpy() if isinstance(tokens, Tensor) else tokens
        self.captions = captions
        self.text = text if text.bpe_dropout else replace(text, tokenizer=_EncodedCaptions(captions, text))

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: np.ndarray, seeds: np.ndarray) -> dict[str, Tensor]:
        """Return {"text": Long [B, T], "image": Long [B, S]}."""
        rngs = [np.random.default_rng(seed) for seed in seeds.tolist()]
        captions = [self.text.choose(self.captions[int(i)], rng) for i, rng in zip(indices, rngs, strict=True)]
        image = torch.from_numpy(self.tokens[indices].astype(np.int64))
        return {"text": self.text.encode(captions, rngs), "image": image}


class _EncodedCaptions:
    """A `CaptionEncoder` of known captions, which it encodes once."""

    def __init__(self, captions: Sequence[Sequence[str]], text: CaptionEncoding) -> None:
        unique = list(dict.fromkeys(c for phrasings in captions for c in phrasings))
        self._rows = {caption: row for row, caption in enumerate(unique)}
        self._tokens = torch.empty(len(unique), text.length, dtype=torch.int32)
        for i in range(0, len(unique), 4096):
            self._tokens[i : i + 4096] = text.tokenizer.encode(unique[i : i + 4096], text.length)

    def encode(self, captions: Sequence[str], length: int, dropout: float = 0.0, rng: Rngs | None = None) -> Tensor:
        return self._tokens[[self._rows[caption] for caption in captions]].long()


class EncodedDataset:
    """An image data set that encodes its pictures to dVAE tokens batch by batch."""

    def __init__(self, images: ImageCaptionDataset, encode: Callable[[Tensor], Tensor]) -> None:
        self.images, self.encode = images, encode

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, indices: np.ndarray, seeds: np.ndarray) -> dict[str, Tensor]:
        """Return {"text": Long [B, T], "image": Long [B, S], "index": Long [B]}."""
        batch = self.images.batch(indices, seeds)
        return {"text": batch["text"], "image": self.encode(batch["pixels"]), "index": batch["index"]}
