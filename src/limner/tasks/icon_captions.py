"""Captions of icons: subject and style, and the change of the lower half of a pair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from limner.tasks.icons import IconDrawing

#: Words for the lower half by kind of pair. Captions of two-style pairs name the style instead.
CHANGES = {"upside down": "upside down", "silhouette": "as a silhouette", "grayscale": "in grayscale"}
_MAX_SHARING = 8  # most subjects that share a keyword
_MAX_KEYWORDS = 3  # most keywords of a subject


def captions(drawing: IconDrawing, keywords: Sequence[str] = ()) -> tuple[str, ...]:
    """Return captions of a drawing, the plain one first. The last ones omit the style, or use a keyword."""
    a_subject, subject, style = article(drawing.subject), drawing.subject, drawing.style
    phrases = (
        f"{a_subject}, {style}", f"{subject}, {style}", f"{noun(style)} of {a_subject}",
        f"{a_subject} in the {style} style", f"{style} {subject}", f"{a_subject} as a {noun(style)}", subject,
        *(f"{word}, {style}" for word in keywords),
    )  # fmt: skip
    return tuple(dict.fromkeys(phrases))


def pair_captions(above: IconDrawing, below: str) -> tuple[str, ...]:
    """Return captions of a pair; `below` describes the lower half ("in grayscale")."""
    a_subject = article(above.subject)
    return (
        f"the exact same {above.subject} on the top {below} at the bottom",
        f"{a_subject}, {above.style}, on the top, and the same thing {below} at the bottom",
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
    """CLDR's specific keywords by emoji: those of at most `_MAX_SHARING` emoji."""

    known: Mapping[str, Sequence[str]]

    @classmethod
    def from_annotations(cls, annotations: Iterable[Mapping[str, Sequence[str]]]) -> Keywords:
        known = {_without_selector(emoji): words for table in annotations for emoji, words in table.items()}
        uses = Counter(word for words in known.values() for word in set(words))
        return cls({emoji: [word for word in words if uses[word] <= _MAX_SHARING] for emoji, words in known.items()})

    def __call__(self, drawing: IconDrawing) -> Sequence[str]:
        """Return up to `_MAX_KEYWORDS` keywords of a drawing other than its subject; () for toned drawings."""
        if drawing.emoji is None or drawing.tones:
            return ()
        words = self.known.get(_without_selector(drawing.emoji), ())
        return [word for word in words if word.lower() != drawing.subject][:_MAX_KEYWORDS]


def _without_selector(emoji: str) -> str:
    return emoji.replace("\ufe0f", "")
