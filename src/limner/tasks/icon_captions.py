"""What drawings of icons are called: subject and style, and what became of the lower half of a pair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from limner.tasks.icons import Drawn

#: Pairs, by what is below: words for it. A pair of two styles says the style instead.
CHANGES = {"upside down": "upside down", "silhouette": "as a silhouette", "grayscale": "in grayscale"}
_SHARED = 8  # subjects that a keyword may stand for
_TAKEN = 3  # keywords of a subject at most


def captions(drawn: Drawn, keywords: Sequence[str] = ()) -> tuple[str, ...]:
    """Phrasings of a drawing, the plain one first; the last leave the style open, or say a keyword instead."""
    thing, subject, style = article(drawn.subject), drawn.subject, drawn.style
    said = (
        f"{thing}, {style}", f"{subject}, {style}", f"{noun(style)} of {thing}", f"{thing} in the {style} style",
        f"{style} {subject}", f"{thing} as a {noun(style)}", subject, *(f"{word}, {style}" for word in keywords),
    )  # fmt: skip
    return tuple(dict.fromkeys(said))


def pair_captions(above: Drawn, below: str) -> tuple[str, ...]:
    """Phrasings of a pair: `above` on the top, and the same thing as `below` says ("in grayscale")."""
    thing = article(above.subject)
    return (
        f"the exact same {above.subject} on the top {below} at the bottom",
        f"{thing}, {above.style}, on the top, and the same thing {below} at the bottom",
        f"the exact same thing on the top {below} at the bottom",
    )


def noun(style: str) -> str:
    """ "flat drawing", "line drawing"."""
    return style if style.endswith("drawing") else f"{style} drawing"


def article(subject: str) -> str:
    """ "a tiger", "an apple", "flag of France", "skis"."""
    first, last = subject.split()[0], subject.split(",")[0].split(" of ")[0].split(" with ")[0]
    if (last.endswith("s") and not last.endswith("ss")) or not first[0].isalpha() or first in ("flag", "keycap"):
        return subject
    return f"an {subject}" if first[0] in "aeiouAEIOU" and not first.startswith(("uni", "eu")) else f"a {subject}"


@dataclass(frozen=True)
class Keywords:
    """CLDR's keywords, as far as they tell subjects apart: those that at most `_SHARED` emoji have."""

    known: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, found: Iterable[Mapping[str, Sequence[str]]]) -> Keywords:
        known = {_bare(emoji): words for one in found for emoji, words in one.items()}
        uses = Counter(word for words in known.values() for word in set(words))
        return cls({emoji: [word for word in words if uses[word] <= _SHARED] for emoji, words in known.items()})

    def __call__(self, drawn: Drawn) -> Sequence[str]:
        """Further names of a drawing's subject, of which its own is none; toned ones have none."""
        if drawn.emoji is None or drawn.tones:
            return ()
        return [word for word in self.known.get(_bare(drawn.emoji), ()) if word.lower() != drawn.subject][:_TAKEN]


def _bare(emoji: str) -> str:
    return emoji.replace("\ufe0f", "")
