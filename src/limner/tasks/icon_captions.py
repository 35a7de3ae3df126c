"""Captions of icons: subject and style, and the change of the lower half of a pair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from limner.tasks.icons import Drawn

#: Words for the lower half by kind of pair. Captions of two-style pairs name the style instead.
CHANGES = {"upside down": "upside down", "silhouette": "as a silhouette", "grayscale": "in grayscale"}
_SHARED = 8  # most subjects that share a keyword
_TAKEN = 3  # most keywords of a subject


def captions(drawn: Drawn, keywords: Sequence[str] = ()) -> tuple[str, ...]:
    """Return captions of a drawing, the plain one first. The last ones omit the style, or use a keyword."""
    thing, subject, style = article(drawn.subject), drawn.subject, drawn.style
    said = (
        f"{thing}, {style}", f"{subject}, {style}", f"{noun(style)} of {thing}", f"{thing} in the {style} style",
        f"{style} {subject}", f"{thing} as a {noun(style)}", subject, *(f"{word}, {style}" for word in keywords),
    )  # fmt: skip
    return tuple(dict.fromkeys(said))


def pair_captions(above: Drawn, below: str) -> tuple[str, ...]:
    """Return captions of a pair; `below` describes the lower half ("in grayscale")."""
    thing = article(above.subject)
    return (
        f"the exact same {above.subject} on the top {below} at the bottom",
        f"{thing}, {above.style}, on the top, and the same thing {below} at the bottom",
        f"the exact same thing on the top {below} at the bottom",
    )


def noun(style: str) -> str:
    """Return a style as a noun: "flat drawing", "line drawing"."""
    return style if style.endswith("drawing") else f"{style} drawing"


def article(subject: str) -> str:
    """Return a subject with its article: "a tiger", "an apple", "flag of France", "skis"."""
    first, last = subject.split()[0], subject.split(",")[0].split(" of ")[0].split(" with ")[0]
    if (last.endswith("s") and not last.endswith("ss")) or not first[0].isalpha() or first in ("flag", "keycap"):
        return subject
    return f"an {subject}" if first[0] in "aeiouAEIOU" and not first.startswith(("uni", "eu")) else f"a {subject}"


@dataclass(frozen=True)
class Keywords:
    """CLDR's specific keywords by emoji: those of at most `_SHARED` emoji."""

    known: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, found: Iterable[Mapping[str, Sequence[str]]]) -> Keywords:
        known = {_bare(emoji): words for one in found for emoji, words in one.items()}
        uses = Counter(word for words in known.values() for word in set(words))
        return cls({emoji: [word for word in words if uses[word] <= _SHARED] for emoji, words in known.items()})

    def __call__(self, drawn: Drawn) -> Sequence[str]:
        """Return up to `_TAKEN` keywords of a drawing other than its subject; () for toned drawings."""
        if drawn.emoji is None or drawn.tones:
            return ()
        return [word for word in self.known.get(_bare(drawn.emoji), ()) if word.lower() != drawn.subject][:_TAKEN]


def _bare(emoji: str) -> str:
    return emoji.replace("\ufe0f", "")
