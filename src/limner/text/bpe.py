"""Byte-level byte-pair encoding (BPE) of captions, with seeded dropout.

A caption is lowercased (Ramesh et al. 2021, §2.2), normalized to Unicode NFC, its white space is collapsed, and it is
split into words that keep their leading space. A word is a sequence of bytes, so every text can be encoded without an
unknown token. Encoding merges pairs, in the order in which training learned them, until no learned pair remains.
Training and inference use the `tokenizers` library.

**Dropout.** While a prior trains, each possible merge is skipped with probability p = 0.1 (BPE-Dropout, Provilkov et
al. 2019), so that the model sees a word split in many ways. The library's dropout cannot be seeded, which would make
resumed runs differ. So `merge_word` is the library's procedure with an explicit source of randomness. It draws the
*number of merges until the next skip*, a geometric variable, instead of a coin for each merge, and carries it from word
to word. The distribution is the same. A word with fewer merges than that number is unaffected and comes from a cache:
about half of all words at p = 0.1.
"""

from __future__ import annotations

import heapq
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Regex, Tokenizer as Library, decoders, models, normalizers, pre_tokenizers, trainers

from limner.atomic_io import atomic_write_text
from limner.errors import UserError
from limner.json_files import read_json
from limner.text import PAD

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Tokenizer", "merge_word"]

VOCAB_SIZE = 16_384
LENGTH = 256

MAX_FILE_BYTES = 64 << 20
MAX_TOKENS = 1 << 18  # also the limit of merges
MAX_CACHED_WORDS = 1 << 16
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())  # a printable character for each byte

Rng = np.random.Generator | Sequence[np.random.Generator] | None  # one for a batch, or one for each caption
Merges = dict[tuple[int, int], tuple[int, int]]  # (left id, right id) -> (rank, merged id)


class Tokenizer:
    """A trained BPE vocabulary. `Tokenizer.train` and `Tokenizer.load` create one.

    Args:
        vocab: token -> id, ids 0 ... n-1, with the 256 byte characters among the tokens.
        merges: the learned pairs, earliest first.

    Raises:
        UserError: `vocab` and `merges` are not a complete byte-level vocabulary.
    """

    def __init__(self, vocab: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> None:
        _check_vocab(vocab, merges)
        self.vocab, self.merges = dict(vocab), list(merges)
        self.library = _build_library(models.BPE(vocab=self.vocab, merges=self.merges))
        self._merge_table: Merges = {
            (self.vocab[a], self.vocab[b]): (rank, self.vocab[a + b]) for rank, (a, b) in enumerate(self.merges)
        }
        self._word_cache: dict[str, tuple[list[int], list[int]]] = {}

    @classmethod
    def train(cls, captions: Iterable[str], vocab_size: int = VOCAB_SIZE, min_frequency: int = 2) -> "Tokenizer":
        """Learn a vocabulary of at most `vocab_size` tokens; a small corpus gives fewer.

        Pairs seen fewer than `min_frequency` times are not merged. Training is deterministic.
        """
        if vocab_size < len(BYTES):
            raise UserError(f"vocab_size must be at least 256, one token for each byte, not {vocab_size}")
        library = _build_library(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, min_frequency=min_frequency, initial_alphabet=BYTES, show_progress=False
        )
        library.train_from_iterator(captions, trainer)
        return cls._from_model(json.loads(library.to_str())["model"])

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read vocabulary and merges from a `tokenizer.json` written by `save` or the library.

        Raises `UserError` for any file but a byte-level BPE tokenizer with lowercasing.
        """
        try:
            data = read_json(path, MAX_FILE_BYTES)
            types = [part["type"] for part in (*data["normalizer"]["normalizers"], data["pre_tokenizer"])]
            if types != _PIPELINE_TYPES or data["added_tokens"]:
                raise UserError("its normalizer or pre-tokenizer differs from limner's")
            return cls._from_model(data["model"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{path} is not a limner tokenizer: {type(error).__name__} {error}") from None
        except UserError as error:
            raise UserError(f"{path} is not a limner tokenizer: {error}") from None

    @classmethod
    def _from_model(cls, model: Mapping) -> "Tokenizer":
        if model["type"] != "BPE":
            raise UserError(f"its model is {model['type']!r}, not 'BPE'")
        return cls(model["vocab"], [(a, b) for a, b in model["merges"]])

    def save(self, path: str | Path) -> None:
        """Write the JSON format of the `tokenizers` library, without dropout."""
        atomic_write_text(Path(path), self.library.to_str(pretty=True))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, the rows of an embedding table."""
        return len(self.vocab)

    def encode(self, captions: Sequence[str], length: int = LENGTH, dropout: float = 0.0, rng: Rng = None) -> Tensor:
        """Return `encode_array` as a tensor."""
        import torch  # not at the top: `runtime/` draws without torch

        return torch.from_numpy(self.encode_array(captions, length, dropout, rng))

    def encode_array(
        self, captions: Sequence[str], length: int = LENGTH, dropout: float = 0.0, rng: Rng = None
    ) -> np.ndarray:
        """Encode captions as int64 [B, length], `PAD` in unused positions.

        Args:
            captions: B texts. Longer ones are cut at a token boundary, with a warning.
            length: T, token positions.
            dropout: probability in [0, 1] of skipping a merge: 0.1 in training, 0 otherwise.
            rng: random generator of the dropout.

        Raises:
            UserError: a caption is empty or not valid Unicode.
        """
        texts = [self._normalize(caption) for caption in captions]
        if "" in texts:
            raise UserError(f"caption {texts.index('') + 1} of {len(texts)} is empty: describe the picture")
        if dropout == 0:
            rows = [encoding.ids for encoding in self.library.encode_batch(texts)]
        elif rng is None:
            raise ValueError("dropout needs a random generator: pass rng")
        else:
            rngs = [rng] * len(texts) if isinstance(rng, np.random.Generator) else rng
            skips = {id(r): _Skips(dropout, r) for r in rngs}
            rows = [self._encode_with_dropout(text, skips[id(r)]) for text, r in zip(texts, rngs, strict=True)]
        tokens = np.full((len(rows), length), PAD, dtype=np.int64)
        for row, ids, text in zip(tokens, rows, texts, strict=True):
            if len(ids) > length:
                warnings.warn(f"a caption of {len(ids)} tokens was cut to {length}: {text[:60]!r} ...", stacklevel=2)
            row[: len(ids)] = ids[:length]
        return tokens

    def decode(self, ids: Sequence[int] | np.ndarray | Tensor) -> str:
        """Decode token ids to normalized text, ignoring `PAD`."""
        values = ids if isinstance(ids, Sequence) else ids.tolist()
        return self.library.decode([i for i in values if i != PAD]).removeprefix(" ")

    def _normalize(self, caption: str) -> str:
        try:
            return self.library.normalizer.normalize_str(caption)
        except UnicodeEncodeError:  # a lone surrogate, from bytes that were not UTF-8
            raise UserError(f"the caption {caption[:60]!r} is not valid Unicode: check its encoding") from None

    def _encode_with_dropout(self, text: str, skips: "_Skips") -> list[int]:
        """Encode a normalized text with dropout."""
        tokens: list[int] = []
        for word, _ in self.library.pre_tokenizer.pre_tokenize_str(text):
            symbols, whole = self._word_cache.get(word) or self._cache_word(word)
            merges = len(symbols) - len(whole)  # each merge removes one symbol
            if skips.gap > merges:
                skips.gap -= merges
                tokens += whole
            else:
                tokens += merge_word(symbols, self._merge_table, skips)
        return tokens

    def _cache_word(self, word: str) -> tuple[list[int], list[int]]:
        if len(self._word_cache) >= MAX_CACHED_WORDS:
            self._word_cache.clear()
        symbols = [self.vocab[byte] for byte in word]
        self._word_cache[word] = symbols, merge_word(symbols, self._merge_table)
        return self._word_cache[word]


class _Skips:
    """Bernoulli(p) decisions to skip a merge, stored as the gap to the next skip: the `gap`-th merge is skipped."""

    def __init__(self, p: float, rng: np.random.Generator) -> None:
        if not 0 < p <= 1:
            raise ValueError(f"dropout must be a probability in [0, 1], not {p}")
        self._p, self._rng = p, rng
        self.gap = int(rng.geometric(p))

    def __call__(self) -> bool:
        self.gap -= 1
        if self.gap > 0:
            return False
        self.gap = int(self._rng.geometric(self._p))
        return True


def merge_word(symbols: Sequence[int], table: Merges, skip: Callable[[], bool] = lambda: False) -> list[int]:
    """Merge a word's symbols, lowest rank first and then leftmost, except where `skip()` is True.

    A heap holds the possible merges, a linked list the symbols: O(n log n). As in the library, a skipped merge becomes
    possible again after the next merge, and the word is done when all possible merges were skipped in a row.
    """
    ids = list(symbols)  # -1: merged into the symbol on the left
    after = list(range(1, len(ids) + 1))  # position of the next symbol
    before = list(range(-1, len(ids) - 1))
    heap = [(*merge, i, pair) for i, pair in enumerate(pairwise(symbols)) if (merge := table.get(pair))]
    heapq.heapify(heap)
    skipped = []
    while heap:
        entry = heapq.heappop(heap)
        _, merged, i, pair = entry
        j = after[i]
        if j == len(ids) or (ids[i], ids[j]) != pair:
            continue  # outdated: another merge used one of the two symbols
        if skip():
            skipped.append(entry)
            continue
        ids[i], ids[j] = merged, -1
        after[i] = j = after[j]
        if j < len(ids):
            before[j] = i
        for left in (before[i], i):
            right = after[left] if left >= 0 else len(ids)
            if right < len(ids) and (merge := table.get(pair := (ids[left], ids[right]))):
                heapq.heappush(heap, (*merge, left, pair))
        for entry in skipped:
            heapq.heappush(heap, entry)
        skipped.clear()
    return [i for i in ids if i >= 0]


def _build_library(model: models.BPE) -> Library:
    library = Library(model)
    library.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    library.decoder = decoders.ByteLevel()
    return library


_PIPELINE_TYPES = ["Lowercase", "NFC", "Replace", "Strip", "ByteLevel"]


def _check_vocab(vocab: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> None:
    if max(len(vocab), len(merges)) > MAX_TOKENS:
        raise UserError(f"it has {len(vocab)} tokens and {len(merges)} merges: the maximum is {MAX_TOKENS}")
    ids = list(vocab.values())
    if any(type(i) is not int for i in ids) or sorted(ids) != list(range(len(ids))):
        raise UserError("the ids of its vocabulary are not 0 ... n-1")
    if missing := [byte for byte in BYTES if byte not in vocab]:
        raise UserError(f"its vocabulary lacks {len(missing)} of the 256 bytes")
    for a, b in merges:
        if a not in vocab or b not in vocab or a + b not in vocab:
            raise UserError(f"it merges {a[:40]!r} with {b[:40]!r}, which its vocabulary lacks")
    if len(set(merges)) < len(merges):
        raise UserError("it merges the same two tokens twice")
