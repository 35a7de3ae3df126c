"""Hard negative captions for training a reranker (Yuksekgonul et al. 2023).

The captions of a batch differ in so many words that a model can distinguish them by half of their words.
A distractor differs from its caption in one change. The three kinds of change are tried in random order:

- one word is exchanged for a word that occurs between the same two neighbors elsewhere in the data:
  "a small red circle" becomes "a small blue circle" or "a small red square";
- two words are swapped, if each occurs in the other's place elsewhere: "a red circle above a blue square"
  becomes "a red square above a blue circle";
- two phrases are swapped: "a red circle above a blue square" becomes "a blue square above a red circle".
  Without these a model learns which objects a picture shows, but not where
  (docs/log/2026-11-22.md, "Spatial relations in the reranker").

The method works on any data, without a grammar. It discards captions that it recognizes as correct: a list in another
order, and, if the facts of a picture are known (`tasks/caption_truth.py`), any true caption. It also discards captions
of held-out samples: a model trained to call them wrong cannot be tested on them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import combinations, islice, product
from typing import Any

import numpy as np

Falsehood = Callable[[str], bool]  # True if a caption is false for one picture, and usable in training
_PIECE = re.compile(r"\w+|[^\w\s]")
_ENOUGH = 100_000  # captions from which the choices are counted
_SEEN = 3  # occurrences between two neighbors that make a word a choice there
_TURNS = 1 << 16  # most pairs of phrases to try; scenes have some hundreds
_LIST = re.compile(r",|\band\b|\bor\b")  # swapping phrases around these keeps the meaning


class Distractors:
    """A generator of distractors: `distract(caption, rng)` returns one, or None if it finds none.

    `captions` are the training captions; no distractor equals one of `held_out`. `falsehood` turns a sample's
    metadata into a test that is true for false captions, or None if the metadata lacks the facts.
    """

    def __init__(
        self,
        captions: Iterable[str],
        held_out: Iterable[str] = (),
        falsehood: Callable[[Mapping[str, Any]], Falsehood | None] = lambda meta: None,
    ) -> None:
        self.falsehood = falsehood
        self.held_out = {caption.lower() for caption in held_out}
        places: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for caption in islice(captions, _ENOUGH):
            for place, word, _ in _places(caption):
                places[place][word] += 1
        self.choices = {  # sorted, as keys of a dictionary for fast lookup
            place: choices
            for place, counts in places.items()
            if (choices := dict.fromkeys(sorted(word for word, count in counts.items() if count >= _SEEN)))
        }

    def distract(self, caption: str, rng: np.random.Generator, wrong: Falsehood | None = None) -> str | None:
        """Return `caption` with a word exchanged, two words swapped or two phrases swapped, or None. `wrong` returns
        True for captions that are false for the picture."""
        kinds = (self._exchange, self._swap, self._turn)
        said = _items(caption)
        for i in rng.permutation(len(kinds)):
            for made in kinds[i](caption, rng):
                if made.lower() not in self.held_out and _items(made) != said and (wrong is None or wrong(made)):
                    return made
        return None

    def _fits(self, word: str, left: str, right: str) -> bool:
        return word in self.choices.get((left, right), ())

    def _exchange(self, caption: str, rng: np.random.Generator) -> Iterator[str]:
        places = list(_places(caption))
        for i in rng.permutation(len(places)):
            place, word, (begin, end) = places[i]
            others = [other for other in self.choices.get(place, ()) if other != word]
            for k in rng.permutation(len(others)):
                yield caption[:begin] + others[k] + caption[end:]

    def _swap(self, caption: str, rng: np.random.Generator) -> Iterator[str]:
        pairs = [
            (one, other)
            for one, other in combinations(_places(caption), 2)
            if one[1] != other[1] and self._fits(other[1], *one[0]) and self._fits(one[1], *other[0])
        ]
        for i in rng.permutation(len(pairs)):
            (*_, first), (*_, second) = pairs[i]
            yield _swapped(caption, first, second)

    def _turn(self, caption: str, rng: np.random.Generator) -> Iterator[str]:
        """Yield captions with two phrases swapped such that every word fits its place, longest phrases first. Yields
        nothing if too many pairs fit, as in a long list of tags."""
        words = list(_places(caption))
        pairs = [(one, other) for one, other in combinations(words, 2) if one[1] != other[1]]
        starts, ends = [], []
        for one, other in pairs:
            ((left, right), word, (begin, end)), ((before, after), second, (start, stop)) = one, other
            if self._fits(second, left, after) and self._fits(word, before, right):
                starts.append((begin, start))
            if self._fits(second, before, right) and self._fits(word, left, after):
                ends.append((end, stop))
        if len(starts) * len(ends) > _TURNS:
            return
        turns = [
            ((begin, end), (start, stop))
            for (begin, start), (end, stop) in product(starts, ends)
            if begin < end < start < stop and not _LIST.search(caption, begin, stop)
        ]
        for first, second in sorted(turns, key=lambda turn: turn[0][0] - turn[0][1] + turn[1][0] - turn[1][1]):
            made = _swapped(caption, first, second)
            if all(self._fits(word, *place) for place, word, _ in _places(made)):
                yield made


def _items(caption: str) -> list[str]:
    """The items that a caption lists, sorted."""
    return sorted(" ".join(item.split()) for item in _LIST.split(caption.lower()))


def _swapped(caption: str, first: tuple[int, int], second: tuple[int, int]) -> str:
    """Swap two spans of a caption; the first ends before the second begins."""
    (begin, end), (start, stop) = first, second
    return caption[:begin] + caption[start:stop] + caption[end:start] + caption[begin:end] + caption[stop:]


def _places(caption: str) -> Iterable[tuple[tuple[str, str], str, tuple[int, int]]]:
    """Yield ((left, right neighbor), word, span) for every word; "" is the neighbor at the ends."""
    pieces = list(_PIECE.finditer(caption))
    words = ["", *(piece.group().lower() for piece in pieces), ""]
    for i, piece in enumerate(pieces):
        if words[i + 1].isalnum():
            yield (words[i], words[i + 2]), words[i + 1], piece.span()
