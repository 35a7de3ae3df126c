"""Data sets: from a source of samples, or from cached tokens, to batches of tensors.

All follow the `Dataset` protocol of `stream.py`: `batch(indices, seeds)` draws all randomness of a
sample from the sample's seed. A sample therefore does not depend on its batch, thread or rank.

A bad sample never stops a run. `ImageCaptionDataset` replaces it by the next good one and counts
the defect in `rejected`.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from limner.data.augment import get_augment, largest_side
from limner.data.filters import Filters
from limner.data.hard_negative_captions import Distractors, FalsityTest
from limner.data.image_decode import decoded
from limner.data.sample import Rejected, Source
from limner.data.stream import Dataset
from limner.errors import UserError
from limner.text import PAD

__all__ = ["CaptionEncoder", "Dataset", "EncodedDataset", "ImageCaptionDataset", "TokenDataset", "sample_rng"]


class CaptionEncoder(Protocol):
    """The tokenizer interface that data sets use, as `limner.text.bpe.Tokenizer` has it."""

    def encode(
        self,
        captions: Sequence[str],
        length: int,
        dropout: float = 0.0,
        rng: np.random.Generator | None = None,
    ) -> Tensor: ...


def sample_rng(seed: int | np.integer[Any]) -> np.random.Generator:
    """Return the random generator of a sample from its uint64 seed."""
    return np.random.Generator(np.random.PCG64(int(seed)))


class ImageCaptionDataset:
    """A data set that decodes and augments pictures on demand.

    `augment` is "dvae" (Listing 1), "prior" (Listing 2) or "none" (the central square, resized).
    With a `tokenizer`, batches hold text: a random phrasing of the caption, encoded with
    `bpe_dropout`. With probability `caption_dropout` the text is empty (all padding), as guidance
    requires. `distractors` holds a generator and the number of distractors per caption. `filters`
    reject samples during reading. Decoding and resizing release the GIL and run in `threads` threads.

    Large JPEGs are decoded at a smaller scale if resizing then still shrinks them at least twofold
    (see `decoded`). With `augment="none"`, if all pictures fit into `cache_bytes` of memory, each is
    decoded once. Raises `UserError` if `source` is empty or `augment` is unknown.
    """

    def __init__(
        self,
        source: Source,
        size: int,
        augment: str = "none",
        tokenizer: CaptionEncoder | None = None,
        text_len: int = 256,
        bpe_dropout: float = 0.0,
        caption_dropout: float = 0.0,
        filters: Filters | None = None,
        distractors: tuple[Distractors, int] | None = None,
        threads: int | None = None,
        cache_bytes: int = 0,
    ) -> None:
        if len(source) == 0:
            raise UserError("the data set is empty: give it samples")
        self.source, self.size, self.augment = source, size, get_augment(augment)
        self.tokenizer, self.text_len = tokenizer, text_len
        self.bpe_dropout, self.caption_dropout, self.filters = bpe_dropout, caption_dropout, filters
        self.distractors, self.threads = distractors, threads or os.cpu_count() or 1
        self._target = largest_side(augment, size)
        self._defects: dict[int, str] = {}
        # One array for all pictures: small arrays among large ones that are freed would fragment the heap.
        caches = augment == "none" and len(source) * 3 * size**2 <= cache_bytes
        self._cached_pixels = np.empty((len(source), 3, size, size), np.uint8) if caches else None
        self._cached_captions: dict[int, tuple[tuple[str, ...], FalsityTest | None]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.source)

    @property
    def rejected(self) -> Counter[str]:
        """Number of bad samples read so far, by reason; each sample counts once."""
        with self._lock:
            return Counter(self._defects.values())

    def _read(self, index: int, rng: np.random.Generator, out: np.ndarray) -> tuple[tuple[str, ...], Any, str | None]:
        """Write sample `index`, augmented, into `out` [3, size, size]. Returns its captions, the test for captions that
        are false for it (None if unknown, or without distractors), and the reason if the sample is bad."""
        if index in self._defects:
            return (), None, self._defects[index]
        if self._cached_pixels is not None and index in self._cached_captions:
            out[:] = self._cached_pixels[index]
            return *self._cached_captions[index], None
        try:
            sample = self.source[index]
            captions = self.filters.captions(sample.captions) if self.filters else sample.captions
            with decoded(sample.image, target=self._target, reuse=True) as image:
                if self.filters:
                    self.filters.image(*image.shape[:2])
                out[:] = self.augment(image, self.size, rng).transpose(2, 0, 1)
        except Rejected as rejected:
            with self._lock:
                self._defects[index] = rejected.reason
            return (), None, rejected.reason
        wrong = self.distractors[0].falsity_test(sample.meta) if self.distractors else None
        if self._cached_pixels is not None:
            self._cached_pixels[index] = out
            self._cached_captions[index] = captions, wrong
        return captions, wrong, None

    def _sample(self, index: int, seed: int, out: np.ndarray) -> tuple[int, str | None, Any, Any]:
        """Write one training sample into `out`. Returns its index, its caption (None if dropped), its generator, and
        the test for captions that are false for it."""
        n = len(self.source)
        for candidate in ((index + step) % n for step in range(n)):
            rng = sample_rng(seed)
            captions, wrong, reason = self._read(candidate, rng, out)
            if reason is None:
                caption = captions[int(rng.integers(len(captions)))]
                return candidate, (None if rng.random() < self.caption_dropout else caption), rng, wrong
        reasons = ", ".join(f"{reason}: {k}" for reason, k in self.rejected.most_common())
        raise UserError(f"none of the {n} samples can be used ({reasons}): check the data")

    def _map(self, function: Any, *arguments: Any) -> list[Any]:
        if self.threads == 1:
            return list(map(function, *arguments))
        with self._lock:
            self._pool = self._pool or ThreadPoolExecutor(self.threads, "decode")
        return list(self._pool.map(function, *arguments))

    def batch(self, indices: np.ndarray, seeds: np.ndarray) -> dict[str, Tensor]:
        """Return {"pixels": uint8 [B, 3, size, size], "index": Long [B], "text": Long [B, text_len] with a tokenizer,
        "distractors": Long [B, K, text_len] with distractors, all padding where a caption lacks one}.

        "index" names the samples read: the next good one replaces a bad one. Raises `UserError` if all are bad.
        """
        pixels = np.empty((len(indices), 3, self.size, self.size), np.uint8)
        samples = self._map(self._sample, indices.tolist(), seeds.tolist(), pixels)
        batch = {"pixels": torch.from_numpy(pixels), "index": torch.tensor([index for index, *_ in samples])}
        if self.tokenizer:
            texts = [(caption, rng) for _, caption, rng, _ in samples]
            batch["text"] = _encode(self.tokenizer, texts, self.text_len, self.bpe_dropout)
        if self.tokenizer and self.distractors:
            make_negative, count = self.distractors[0].make_negative, self.distractors[1]
            negatives = [
                (caption and make_negative(caption, rng, wrong), rng)
                for _, caption, rng, wrong in samples
                for _ in range(count)
            ]
            encoded = _encode(self.tokenizer, negatives, self.text_len, self.bpe_dropout)
            batch["distractors"] = encoded.unflatten(0, (-1, count))
        return batch

    def load(self, indices: np.ndarray) -> tuple[np.ndarray, Tensor, list[tuple[str, ...]], Counter[str]]:
        """Load the good samples among `indices` without replacing bad ones. Returns their indices,
        pixels uint8 [B, 3, size, size], all captions, and the number of bad samples by reason."""
        pixels = np.empty((len(indices), 3, self.size, self.size), np.uint8)
        rngs = [sample_rng(0) for _ in indices]
        results = self._map(self._read, indices.tolist(), rngs, pixels)
        good = np.array([reason is None for *_, reason in results], bool)
        return (
            indices[good],
            torch.from_numpy(pixels[good]),
            [captions for captions, _, reason in results if reason is None],
            Counter(reason for *_, reason in results if reason is not None),
        )

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_pool", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _pool=None, _lock=threading.Lock())


class TokenDataset:
    """A data set of cached tokens [N, S] and their captions.

    `captions[i]` holds the phrasings of row i, of which `batch` chooses one at random. Without BPE
    dropout the constructor encodes every caption. Raises `ValueError` if the lengths differ.
    """

    def __init__(
        self,
        tokens: np.ndarray | Tensor,
        captions: Sequence[Sequence[str]],
        tokenizer: CaptionEncoder,
        text_len: int = 256,
        bpe_dropout: float = 0.0,
        caption_dropout: float = 0.0,
    ) -> None:
        if len(tokens) != len(captions):
            raise ValueError(f"{len(tokens)} rows of tokens but {len(captions)} of captions")
        self.tokens = tokens.numpy() if isinstance(tokens, Tensor) else tokens
        self.captions, self.tokenizer, self.text_len = captions, tokenizer, text_len
        self.bpe_dropout, self.caption_dropout = bpe_dropout, caption_dropout
        self._rows: dict[str, int] = {}
        self._encoded = torch.empty(0, text_len, dtype=torch.int32)
        if not bpe_dropout:
            unique = list(dict.fromkeys(c for phrasings in captions for c in phrasings))
            self._rows = {caption: row for row, caption in enumerate(unique)}
            parts = [unique[i : i + 4096] for i in range(0, len(unique), 4096)]
            encoded = [tokenizer.encode(part, text_len).to(torch.int32) for part in parts]
            self._encoded = torch.cat(encoded) if encoded else self._encoded

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: np.ndarray, seeds: np.ndarray) -> dict[str, Tensor]:
        """Return {"text": Long [B, text_len], "image": Long [B, S]}."""
        texts = [self._phrasing(i, seed) for i, seed in zip(indices, seeds, strict=True)]
        if self.bpe_dropout:
            text = _encode(self.tokenizer, texts, self.text_len, self.bpe_dropout)
        else:
            text = torch.full((len(texts), self.text_len), PAD)
            captioned = [b for b, (caption, _) in enumerate(texts) if caption is not None]
            rows = [self._rows[caption] for caption, _ in texts if caption is not None]
            text[captioned] = self._encoded[rows].long()
        image = torch.from_numpy(self.tokens[indices].astype(np.int64))
        return {"text": text, "image": image}

    def _phrasing(self, index: int, seed: int) -> tuple[str | None, np.random.Generator]:
        rng = sample_rng(seed)
        phrasings = self.captions[int(index)]
        caption = phrasings[int(rng.integers(len(phrasings)))]
        return (None if rng.random() < self.caption_dropout else caption), rng


def _encode(
    tokenizer: CaptionEncoder,
    texts: Sequence[tuple[str | None, np.random.Generator]],
    length: int,
    dropout: float,
) -> Tensor:
    """Encode captions to Long [B, length], each with its generator; None becomes all padding."""
    out = torch.full((len(texts), length), PAD)
    captioned = [b for b, (caption, _) in enumerate(texts) if caption is not None]
    captions = [caption for caption, _ in texts if caption is not None]
    if not captions:
        return out
    if dropout:
        rows = [tokenizer.encode([texts[b][0] or ""], length, dropout, texts[b][1]) for b in captioned]
        out[captioned] = torch.cat(rows)
    else:
        out[captioned] = tokenizer.encode(captions, length)
    return out


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
