"""Wrong captions that look right, for training a reranker (Yuksekgonul et al. 2023 call them hard negatives).

The captions of a batch differ in so many words that a model which reads half of them tells them apart.
Candidates of *one* caption differ in a single thing. So a word is exchanged for another that stands
between the same two neighbours elsewhere in the data: "a small red circle" becomes "a small blue circle"
or "a small red square". And two words of a caption change places where each could stand in the other's:
"a red circle above a blue square" becomes "a red square above a blue circle", which the same words say.
That needs no list of words and serves any data; now and then the result is still true of the picture,
which a contrastive loss bears.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import combinations, islice

import numpy as np

_PIECE = re.compile(r"\w+|[^\w\s]")
_ENOUGH = 100_000  # captions that are looked at
_SEEN = 3  # times a word must stand in a place to be a choice for it


class Distractors:
    """`distract(caption, rng)` gives a distractor, or None where no word has an alternative."""

    def __init__(self, captions: Iterable[str]) -> None:
        places: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for caption in islice(captions, _ENOUGH):
            for place, word, _ in _places(caption):
                places[place][word] += 1
        self.choices = {
            place: choices
            for place, counts in places.items()
            if len(choices := sorted(word for word, count in counts.items() if count >= _SEEN)) > 1
        }

    def distract(self, caption: str, rng: np.random.Generator) -> str | None:
        """Two words swapped or one exchanged, each half of the time where both can be."""
        first, second = (self._swap, self._exchange) if rng.random() < 0.5 else (self._exchange, self._swap)
        return first(caption, rng) or second(caption, rng)

    def _exchange(self, caption: str, rng: np.random.Generator) -> str | None:
        places = list(_places(caption))
        for i in rng.permutation(len(places)):
            place, word, (begin, end) = places[i]
            others = [other for other in self.choices.get(place, ()) if other != word]
            if others:
                return caption[:begin] + others[int(rng.integers(len(others)))] + caption[end:]
        return None

    def _swap(self, caption: str, rng: np.random.Generator) -> str | None:
        pairs = [
            (one, other)
            for one, other in combinations(_places(caption), 2)
            if one[1] != other[1]
            and other[1] in self.choices.get(one[0], ())
            and one[1] in self.choices.get(other[0], ())
        ]
        if not pairs:
            return None
        (_, word, (begin, end)), (_, other, (start, stop)) = pairs[int(rng.integers(len(pairs)))]
        return caption[:begin] + other + caption[end:start] + word + caption[stop:]


def _places(caption: str) -> Iterable[tuple[tuple[str, str], str, tuple[int, int]]]:
    """(left and right neighbour, word, where it stands) for every word; "" beyond the ends."""
    pieces = list(_PIECE.finditer(caption))
    words = ["", *(piece.group().lower() for piece in pieces), ""]
    for i, piece in enumerate(pieces):
        if words[i + 1].isalnum():
            yield (words[i], words[i + 2]), words[i + 1], piece.span()
