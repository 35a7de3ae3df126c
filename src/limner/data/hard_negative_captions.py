"""Hard negative captions for training a reranker (Yuksekgonul et al. 2023).

The captions of a batch differ in so many words that a model can distinguish them by half of their words.
A distractor differs from its caption in one change. The three kinds of change are tried in random order:

- one word is replaced by a word that occurs between the same two neighbors elsewhere in the data:
  "a small red circle" becomes "a small blue circle" or "a small red square";
- two words are swapped, if each occurs in the other's place elsewhere: "a red circle above a blue square"
  becomes "a red square above a blue circle";
- two phrases are swapped: "a red circle above a blue square" becomes "a blue square above a red circle".
  Without these a model learns which objects a picture shows, but not where
  (docs/log/2026-11-22.md, "Spatial relations in the reranker").

The method works on any data, without a grammar. It discards captions that it recognizes as correct: a list in another
order, and, if the facts of a picture are known (`tasks/verify.py`), any true caption. It also discards captions
of held-out samples: a model trained to call them wrong cannot be tested on them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import combinations, product
from typing import Any

import numpy as np

FalsityTest = Callable[[str], bool]  # True if a caption is false for one picture, and usable in training
_TOKEN = re.compile(r"\w+|[^\w\s]")
_MIN_OCCURRENCES = 3  # occurrences between two neighbors that make a word a choice there
_MAX_PHRASE_PAIRS = 1 << 16  # most pairs of phrases to try; scenes have some hundreds
_LIST_SEPARATOR = re.compile(r",|\band\b|\bor\b")  # swapping phrases around these keeps the meaning


class Distractors:
    """A generator of distractors: `make_negative(caption, rng)` returns one, or None if it finds none.

    `captions` are the training captions; no distractor equals one of `held_out`. `falsity_test` turns a sample's
    metadata into a test that is true for false captions, or None if the metadata lacks the facts. A data set asks for
    `count` distractors per caption.
    """

    def __init__(
        self,
        captions: Iterable[str],
        held_out: Iterable[str] = (),
        falsity_test: Callable[[Mapping[str, Any]], FalsityTest | None] = lambda meta: None,
        count: int = 1,
    ) -> None:
        self.falsity_test, self.count = falsity_test, count
        self.held_out = {caption.lower() for caption in held_out}
        words: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for caption in captions:
            for context, word, _ in _word_contexts(caption):
                words[context][word] += 1
        self.choices = {  # sorted, as keys of a dictionary for fast lookup
            context: choices
            for context, counts in words.items()
            if (choices := dict.fromkeys(sorted(word for word, count in counts.items() if count >= _MIN_OCCURRENCES)))
        }

    def make_negative(self, caption: str, rng: np.random.Generator, wrong: FalsityTest | None = None) -> str | None:
        """Return `caption` with a word replaced, two words swapped or two phrases swapped, or None. `wrong` returns
        True for captions that are false for the picture."""
        changes = (self.replace_word, self.swap_words, self.swap_phrases)
        items = _list_items(caption)
        for i in rng.permutation(len(changes)):
            for negative in changes[i](caption, rng):
                differs = negative.lower() not in self.held_out and _list_items(negative) != items
                if differs and (wrong is None or wrong(negative)):
                    return negative
        return None

    def _fits(self, word: str, left: str, right: str) -> bool:
        return word in self.choices.get((left, right), ())

    def replace_word(self, caption: str, rng: np.random.Generator) -> Iterator[str]:
        contexts = list(_word_contexts(caption))
        for i in rng.permutation(len(contexts)):
            context, word, (begin, end) = contexts[i]
            others = [other for other in self.choices.get(context, ()) if other != word]
            for k in rng.permutation(len(others)):
                yield caption[:begin] + others[k] + caption[end:]

    def swap_words(self, caption: str, rng: np.random.Generator) -> Iterator[str]:
        pairs = [
            (a, b)
            for a, b in combinations(_word_contexts(caption), 2)
            if a[1] != b[1] and self._fits(b[1], *a[0]) and self._fits(a[1], *b[0])
        ]
        for i in rng.permutation(len(pairs)):
            (*_, first), (*_, second) = pairs[i]
            yield _swap_spans(caption, first, second)

    def swap_phrases(self, caption: str, rng: np.random.Generator) -> Iterator[str]:
        """Yield captions with two phrases swapped such that every word fits its place, longest phrases first. Yields
        nothing if too many pairs fit, as in a long list of tags."""
        words = list(_word_contexts(caption))
        pairs = [(a, b) for a, b in combinations(words, 2) if a[1] != b[1]]
        starts, ends = [], []
        for a, b in pairs:
            ((left, right), word, (begin, end)), ((before, after), second, (start, stop)) = a, b
            if self._fits(second, left, after) and self._fits(word, before, right):
                starts.append((begin, start))
            if self._fits(second, before, right) and self._fits(word, left, after):
                ends.append((end, stop))
        if len(starts) * len(ends) > _MAX_PHRASE_PAIRS:
            return
        swaps = [
            ((begin, end), (start, stop))
            for (begin, start), (end, stop) in product(starts, ends)
            if begin < end < start < stop and not _LIST_SEPARATOR.search(caption, begin, stop)
        ]
        for first, second in sorted(swaps, key=lambda swap: swap[0][0] - swap[0][1] + swap[1][0] - swap[1][1]):
            negative = _swap_spans(caption, first, second)
            if all(self._fits(word, *context) for context, word, _ in _word_contexts(negative)):
                yield negative


def _list_items(caption: str) -> list[str]:
    """The items that a caption lists, sorted."""
    return sorted(" ".join(item.split()) for item in _LIST_SEPARATOR.split(caption.lower()))


def _swap_spans(caption: str, first: tuple[int, int], second: tuple[int, int]) -> str:
    """Swap two spans of a caption; the first ends before the second begins."""
    (begin, end), (start, stop) = first, second
    return caption[:begin] + caption[start:stop] + caption[end:start] + caption[begin:end] + caption[stop:]


def _word_contexts(caption: str) -> Iterable[tuple[tuple[str, str], str, tuple[int, int]]]:
    """Yield ((left, right neighbor), word, span) for every word; "" is the neighbor at the ends."""
    tokens = list(_TOKEN.finditer(caption))
    words = ["", *(token.group().lower() for token in tokens), ""]
    for i, token in enumerate(tokens):
        if words[i + 1].isalnum():
            yield (words[i], words[i + 2]), words[i + 1], token.span()
