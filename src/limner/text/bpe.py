"""Captions to tokens: byte-level byte-pair encoding with seeded dropout.

A caption is lowercased (section 2 of the paper), brought to Unicode NFC, its white space collapsed,
and split into words that keep their leading space. Each word is then a sequence of bytes, so that
any text encodes and there is no unknown token; the bytes are merged pair by pair, the pair learned
earliest first, until no learned pair is left. Training and inference use the `tokenizers` library.

**Dropout.** While a prior trains, every merge that could happen is skipped with probability p = 0.1
(Provilkov et al. 2019, "BPE-Dropout"), so that the model sees a word cut in many ways. The
library's own dropout cannot be seeded, which would break resuming. `_merge` below is therefore the
library's procedure with an explicit source of randomness. Instead of flipping a coin for each merge
we draw the *number of merges until the next skip*, a geometric variable, and carry it from word to
word. The distribution is the same, and a word with fewer merges than that gap is known at once to
be untouched and comes from a cache: about half of all words at p = 0.1.
"""

import hashlib
import heapq
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from tokenizers import (
    Regex,
    Tokenizer as Library,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from torch import Tensor

from limner.atomic_io import atomic_write_text
from limner.errors import UserError
from limner.json_files import read_json
from limner.text import PAD

VOCAB_SIZE = 16_384
LENGTH = 256

MAX_BYTES = 64 << 20  # of a tokenizer file
MAX_TOKENS = 1 << 18  # of a vocabulary, or merges
MAX_CACHED_WORDS = 1 << 16
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())  # a printable character for each byte

Merges = dict[tuple[int, int], tuple[int, int]]  # (left id, right id) -> (rank, merged id)


class Tokenizer:
    """A trained vocabulary. Make one with `Tokenizer.train` or `Tokenizer.load`.

    Args:
        vocab: token -> id, ids 0 ... n-1, with the 256 byte characters among the tokens.
        merges: the learned pairs, earliest first.

    Raises:
        UserError: the two do not make a complete byte-level vocabulary.
    """

    def __init__(self, vocab: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> None:
        _check(vocab, merges)
        self.vocab, self.merges = dict(vocab), list(merges)
        self._library = _pipeline(models.BPE(vocab=self.vocab, merges=self.merges))
        self._table: Merges = {
            (self.vocab[a], self.vocab[b]): (rank, self.vocab[a + b]) for rank, (a, b) in enumerate(self.merges)
        }
        self._words: dict[str, tuple[list[int], list[int]]] = {}

    @classmethod
    def train(cls, captions: Iterable[str], vocab_size: int = VOCAB_SIZE, min_frequency: int = 2) -> "Tokenizer":
        """Learn a vocabulary of at most `vocab_size` tokens; a small corpus gives fewer.

        Pairs seen fewer than `min_frequency` times are not merged. The same captions give the same
        vocabulary.
        """
        if vocab_size < len(BYTES):
            raise UserError(f"a vocabulary has one token for each byte: 256 or more, not {vocab_size}")
        library = _pipeline(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=min_frequency,
            initial_alphabet=BYTES,
            show_progress=False,
        )
        library.train_from_iterator(captions, trainer)
        return cls._from_model(json.loads(library.to_str())["model"])

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read `tokenizer.json` as `save` or the library wrote it. Only vocabulary and merges are
        taken from it.

        Raises `UserError` for a file that is no byte-level BPE tokenizer with lowercasing, whatever
        is wrong with it.
        """
        try:
            data = read_json(path, MAX_BYTES)
            kinds = [part["type"] for part in (*data["normalizer"]["normalizers"], data["pre_tokenizer"])]
            if kinds != _KINDS or data["added_tokens"]:
                raise UserError("it splits text in another way than limner does")
            return cls._from_model(data["model"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{path} is not a tokenizer of limner: {type(error).__name__} {error}") from None
        except UserError as error:
            raise UserError(f"{path} is not a tokenizer of limner: {error}") from None

    @classmethod
    def _from_model(cls, model: Mapping) -> "Tokenizer":
        if model["type"] != "BPE":
            raise UserError(f"its model is {model['type']!r}, not 'BPE'")
        return cls(model["vocab"], [(a, b) for a, b in model["merges"]])

    def save(self, path: str | Path) -> None:
        """Write the library's JSON format, without dropout."""
        atomic_write_text(Path(path), self._library.to_str(pretty=True))

    @property
    def vocab_size(self) -> int:
        """Number of tokens: the size for embedding tables."""
        return len(self.vocab)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of vocabulary and merges, for keys of caches."""
        content = json.dumps([sorted(self.vocab.items()), self.merges], ensure_ascii=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def encode(
        self,
        captions: Sequence[str],
        length: int = LENGTH,
        dropout: float = 0.0,
        rng: np.random.Generator | Sequence[np.random.Generator] | None = None,
    ) -> Tensor:
        """Captions as a long tensor [B, length], `PAD` in unused positions.

        Args:
            captions: B texts. What does not fit is cut at a token boundary, with a warning.
            length: T, token positions.
            dropout: probability in [0, 1] of skipping a merge: 0.1 in training, 0 otherwise.
            rng: randomness of the dropout, for the batch or one for each caption. All of the result
                depends on it.

        Raises:
            UserError: a caption is empty, or no valid Unicode.
        """
        texts = [self._normalise(caption) for caption in captions]
        if "" in texts:
            where = f"caption {texts.index('') + 1} of {len(texts)}"
            raise UserError(f"{where} is empty; write what the picture shows")
        if dropout == 0:
            rows = [encoding.ids for encoding in self._library.encode_batch(texts)]
        elif rng is None:
            raise ValueError("dropout needs an rng")
        else:
            rngs = [rng] * len(texts) if isinstance(rng, np.random.Generator) else rng
            skips = {id(r): _Skips(dropout, r) for r in rngs}
            rows = [self._drop(text, skips[id(r)]) for text, r in zip(texts, rngs, strict=True)]
        tokens = np.full((len(rows), length), PAD, dtype=np.int64)
        for row, ids, text in zip(tokens, rows, texts, strict=True):
            if len(ids) > length:
                warnings.warn(
                    f"a caption of {len(ids)} tokens was cut to {length}: {text[:60]!r} ...",
                    stacklevel=2,
                )
            row[: len(ids)] = ids[:length]
        return torch.from_numpy(tokens)

    def decode(self, ids: Sequence[int] | Tensor) -> str:
        """The normalised text of token ids; `PAD` is passed over."""
        values = ids.tolist() if isinstance(ids, Tensor) else ids
        return self._library.decode([i for i in values if i != PAD]).removeprefix(" ")

    def _normalise(self, caption: str) -> str:
        try:
            return self._library.normalizer.normalize_str(caption)
        except UnicodeEncodeError:  # half of a surrogate pair, from bytes that were not UTF-8
            raise UserError(f"the caption {caption[:60]!r} is not valid Unicode") from None

    def _drop(self, text: str, skips: "_Skips") -> list[int]:
        """The tokens of a normalised text, with merges skipped where `skips` says so."""
        tokens: list[int] = []
        for word, _ in self._library.pre_tokenizer.pre_tokenize_str(text):
            symbols, whole = self._words.get(word) or self._remember(word)
            merges = len(symbols) - len(whole)  # each merge takes one symbol away
            if skips.gap > merges:
                skips.gap -= merges
                tokens += whole
            else:
                tokens += _merge(symbols, self._table, skips)
        return tokens

    def _remember(self, word: str) -> tuple[list[int], list[int]]:
        if len(self._words) >= MAX_CACHED_WORDS:
            self._words.clear()
        symbols = [self.vocab[byte] for byte in word]
        self._words[word] = symbols, _merge(symbols, self._table)
        return self._words[word]


class _Skips:
    """A coin that says "skip" with probability p, as gaps: the `gap`-th merge from here is skipped."""

    def __init__(self, p: float, rng: np.random.Generator) -> None:
        if not 0 < p <= 1:
            raise ValueError(f"dropout is a probability in [0, 1], not {p}")
        self._p, self._rng = p, rng
        self.gap = int(rng.geometric(p))

    def __call__(self) -> bool:
        self.gap -= 1
        if self.gap > 0:
            return False
        self.gap = int(self._rng.geometric(self._p))
        return True


def _never() -> bool:
    return False


def _merge(symbols: Sequence[int], table: Merges, skip=_never) -> list[int]:
    """Merge a word's symbols, lowest rank first and then leftmost, passing over one if `skip()`.

    A heap holds the possible merges, a linked list the symbols: O(n log n). A skipped merge becomes
    possible again as soon as another one has happened, as in the library; at the end all that are
    left have just been skipped.
    """
    ids = list(symbols)  # -1: merged into its left neighbour
    after = list(range(1, len(ids) + 1))  # position of the right neighbour
    before = list(range(-1, len(ids) - 1))
    heap = [(*merge, i, pair) for i, pair in enumerate(pairwise(symbols)) if (merge := table.get(pair))]
    heapq.heapify(heap)
    skipped = []
    while heap:
        entry = heapq.heappop(heap)
        _, merged, i, pair = entry
        j = after[i]
        if j == len(ids) or (ids[i], ids[j]) != pair:
            continue  # one of the two has been merged otherwise
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


def _pipeline(model: models.BPE) -> Library:
    library = Library(model)
    library.normalizer = normalizers.Sequence(
        [
            normalizers.Lowercase(),
            normalizers.NFC(),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Strip(),
        ]
    )
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    library.decoder = decoders.ByteLevel()
    return library


_KINDS = ["Lowercase", "NFC", "Replace", "Strip", "ByteLevel"]


def _check(vocab: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> None:
    if max(len(vocab), len(merges)) > MAX_TOKENS:
        raise UserError(f"it has {len(vocab)} tokens and {len(merges)} merges: more than {MAX_TOKENS}")
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
