"""Wrong captions that look right, for training a reranker (Yuksekgonul et al. 2023 call them hard negatives).

The captions of a batch differ in so many words that a model which reads half of them tells them apart.
Candidates of *one* caption differ in a single thing. So, a third of the time each, where it can be,

- a word is exchanged for another that stands between the same two neighbours elsewhere in the data:
  "a small red circle" becomes "a small blue circle" or "a small red square";
- two words change places where each could stand in the other's: "a red circle above a blue square"
  becomes "a red square above a blue circle";
- two phrases change places: "a red circle above a blue square" becomes "a blue square above a red circle".
  Without these a model learns what there is, and not where
  (docs/log/2026-11-22.md, "Spatial relations in the reranker").

This needs no grammar and works on any data. Captions that mean the same are left out as far as they can be recognised:
a list in another order, and, if the facts of a picture are known (`tasks/caption_truth.py`), whatever is true of it.
Captions of held-out samples are left out, too: a model that was taught that they are wrong cannot be tested on them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import combinations, islice, product
from typing import Any

import numpy as np

Falsehood = Callable[[str], bool]  # whether a caption is wrong of one picture, and fit for training
_PIECE = re.compile(r"\w+|[^\w\s]")
_ENOUGH = 100_000  # captions that are looked at
_SEEN = 3  # times a word must stand in a place to be a choice for it
_TURNS = 1 << 16  # pairs of phrases that are tried; scenes have some hundreds
_LIST = re.compile(r",|\band\b|\bor\b")  # around these, phrases change places and say the same


class Distractors:
    """`distract(caption, rng)` gives a distractor, or None where there is none.

    `captions` are those of training, `held_out` those that no distractor may equal. `falsehood` turns a sample's
    metadata into a test of whether a caption is false of it, or None if the metadata does not say what is true.
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
        self.choices = {  # in order, each list as the keys of a dictionary, which are found at once
            place: choices
            for place, counts in places.items()
            if (choices := dict.fromkeys(sorted(word for word, count in counts.items() if count >= _SEEN)))
        }

    def distract(self, caption: str, rng: np.random.Generator, wrong: Falsehood | None = None) -> str | None:
        """A caption with a word exchanged, two words swapped or two phrases swapped. `wrong`, if known, tests whether a
        caption is false of the picture."""
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
        """Captions with two phrases swapped such that every word stands where it could, the longest phrases first; none
        where nearly all words fit anywhere, as in a long list of tags."""
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
    """What a caption lists, in an order that does not depend on how it lists it."""
    return sorted(" ".join(item.split()) for item in _LIST.split(caption.lower()))


def _swapped(caption: str, first: tuple[int, int], second: tuple[int, int]) -> str:
    """The words with two stretches swapped; the first ends before the second begins."""
    (begin, end), (start, stop) = first, second
    return caption[:begin] + caption[start:stop] + caption[end:start] + caption[begin:end] + caption[stop:]


def _places(caption: str) -> Iterable[tuple[tuple[str, str], str, tuple[int, int]]]:
    """(left and right neighbour, word, where it stands) for every word; "" beyond the ends."""
    pieces = list(_PIECE.finditer(caption))
    words = ["", *(piece.group().lower() for piece in pieces), ""]
    for i, piece in enumerate(pieces):
        if words[i + 1].isalnum():
            yield (words[i], words[i + 2]), words[i + 1], piece.span()
