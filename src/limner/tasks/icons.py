"""Joint data set of icons: drawings of the same subjects by several artists, with styles, captions and a split.

Sets name the same subject differently ("cat-face", "cat"). A drawing with known code points shows that emoji. Other
drawings are joined to an emoji by name: Unicode's English name, an alias in the `emoji` package, or a name for which
another set has the code points. A drawing that matches no emoji is a separate subject under its own name.

Split. Bases are subjects without skin tones. Of the bases with at least four styles, one in twenty is held out in one
style, with all tones and all mirrored copies: the **combination** is never seen, but base and style are. Another one
in a hundred is held out in all styles, a whole **subject**. The choices are hashes of names, independent
of the order of the files.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from limner.tasks.emoji import Emoji, all_emoji
from limner.tasks.iconify import Icon, IconSet

HeldOut = Literal["combination", "subject", "pair"]

#: Style of each set, as named in captions.
STYLES = {
    "noto": "shaded",
    "noto-v1": "blob",
    "twemoji": "flat",
    "fluent-emoji": "3d",
    "fluent-emoji-flat": "vivid",
    "fluent-emoji-high-contrast": "line drawing",
    "emojione": "cartoon",
    "emojione-monotone": "ink drawing",
    "fxemoji": "simple",
    "openmoji": "comic",
}
_MIN_STYLES = 4  # least number of styles of a base that may be held out
_MAX_SHARING = 8  # most emoji that share a keyword
_MAX_KEYWORDS = 3  # most keywords of a subject


@dataclass(frozen=True)
class IconDrawing:
    """A drawing with its metadata. `emoji` may be None (unmatched), as may `category` (unknown)."""

    set: IconSet
    icon: Icon
    style: str
    subject: str
    base: str
    tones: tuple[str, ...]
    emoji: str | None
    category: str | None = None
    held_out: HeldOut | None = None

    @property
    def metadata(self) -> dict[str, object]:
        """The metadata of the drawing in a shard."""
        metadata = {
            "subject": self.subject, "style": self.style, "set": self.set.prefix, "name": self.icon.name,
            "base": self.base, "tones": list(self.tones), "emoji": self.emoji, "category": self.category,
            "license": self.set.license, "author": self.set.author, "source": self.set.source,
            "split": "held-out" if self.held_out else "train", "held_out": self.held_out,
        }  # fmt: skip
        return {key: value for key, value in metadata.items() if value is not None}


def join_sets(sets: Sequence[IconSet]) -> tuple[list[IconDrawing], Counter[str]]:
    """Return the drawings of all sets, one of each subject and style, and the number left out by reason."""
    emoji_index = _EmojiIndex(sets)
    drawings: dict[tuple[str, str], IconDrawing] = {}
    rejected = sum((Counter(icon_set.rejected) for icon_set in sets), Counter[str]())
    for icon_set in sets:
        style = STYLES.get(icon_set.prefix, icon_set.title.lower())
        for icon in icon_set.icons.values():
            emoji = emoji_index.find(icon_set, icon)
            if emoji is None:
                subject = base = to_words(icon.name)
                tones = ()
            else:
                base, tones = f"flag of {emoji.name}" if emoji.is_flag else emoji.base, emoji.tones
                subject = f"{base}, {' and '.join(dict.fromkeys(tones))} skin tone" if tones else base
            if not subject:
                rejected["name without words"] += 1
                continue
            if (subject, style) in drawings:
                rejected["duplicate subject and style"] += 1
            text, category = emoji and emoji.text, icon_set.category(icon)
            drawing = IconDrawing(icon_set, icon, style, subject, base, tones, text, category)
            drawings.setdefault((subject, style), drawing)
    return _assign_splits(list(drawings.values())), rejected


def _assign_splits(drawings: list[IconDrawing]) -> list[IconDrawing]:
    styles: defaultdict[str, set[str]] = defaultdict(set)
    for drawing in drawings:
        styles[drawing.base].add(drawing.style)
    held_out: dict[tuple[str, str], HeldOut] = {}
    for base, names in styles.items():
        if len(names) >= _MIN_STYLES:
            if stable_hash("subject", base) % 100 == 0:
                held_out |= {(base, style): "subject" for style in names}
            elif stable_hash("combination", base) % 20 == 0:
                held_out[base, sorted(names)[stable_hash("style", base) % len(names)]] = "combination"
    kinds = {(d.set.prefix, d.icon.root): kind for d in drawings if (kind := held_out.get((d.base, d.style)))}
    return [replace(d, held_out=kinds.get((d.set.prefix, d.icon.root))) for d in drawings]


def to_words(name: str) -> str:
    """Return a name in lowercase words: "arrow-up_2" -> "arrow up 2"."""
    return " ".join(re.sub(r"[^\w]+|_", " ", name).lower().split())[:100]


def stable_hash(*parts: str) -> int:
    """Return a 64-bit hash of the texts, equal in every process."""
    return int.from_bytes(hashlib.sha256("|".join(parts).encode()).digest()[:8], "big")


class _EmojiIndex:
    """An index of emoji by code points and by name."""

    def __init__(self, sets: Sequence[IconSet]) -> None:
        every = all_emoji()
        self.by_codes = {_without_selectors("-".join(f"{ord(c):x}" for c in emoji.text)): emoji for emoji in every}
        names = [(emoji.name, emoji) for emoji in every]
        names += [(alias, emoji) for emoji in every for alias in emoji.aliases]
        for icon_set in sets:
            names += [(name, self.by_codes.get(_without_selectors(codes))) for name, codes in icon_set.codes.items()]
        self.by_name: dict[str, Emoji] = {}
        for name, emoji in names:
            if emoji:
                self.by_name.setdefault(_key(name), emoji)

    def find(self, icon_set: IconSet, icon: Icon) -> Emoji | None:
        names = icon_set.names(icon)
        codes = (_without_selectors(icon_set.codes[name]) for name in names if name in icon_set.codes)
        matches = (*map(self.by_codes.get, codes), *(self.by_name.get(_key(name)) for name in names))
        return next((emoji for emoji in matches if emoji), None)


def _key(name: str) -> str:
    """Return a name without case, spaces and punctuation, which differ between sets."""
    return re.sub(r"[\W_]+", "", name.lower().replace("&", "and"))


def _without_selectors(codes: str) -> str:
    """Return code points without the variation selector for color, which only some sets write."""
    return "-".join(code for code in str(codes).lower().split("-") if code.lstrip("0") != "fe0f")


# ---------------------------------------------------------------------------- captions


def captions(drawing: IconDrawing, keywords: Sequence[str] = ()) -> tuple[str, ...]:
    """Return captions of a drawing, the plain one first. The last ones omit the style, or use a keyword."""
    a_subject, subject, style = article(drawing.subject), drawing.subject, drawing.style
    phrases = (
        f"{a_subject}, {style}", f"{subject}, {style}", f"{noun(style)} of {a_subject}",
        f"{a_subject} in the {style} style", f"{style} {subject}", f"{a_subject} as a {noun(style)}", subject,
        *(f"{word}, {style}" for word in keywords),
    )  # fmt: skip
    return tuple(dict.fromkeys(phrases))


def noun(style: str) -> str:
    """Return a style as a noun: "flat drawing", "line drawing"."""
    return style if style.endswith("drawing") else f"{style} drawing"


def article(subject: str) -> str:
    """Return a subject with its article: "a tiger", "an apple", "flag of France", "skis"."""
    first, last = subject.split()[0], subject.split(",")[0].split(" of ")[0].split(" with ")[0]
    if (last.endswith("s") and not last.endswith("ss")) or not first[0].isalpha() or first in ("flag", "keycap"):
        return subject
    return f"an {subject}" if first[0] in "aeiouAEIOU" and not first.startswith(("uni", "eu")) else f"a {subject}"


class Keywords:
    """CLDR's specific keywords by emoji: those of few emoji. `annotations` are tables of keywords by emoji."""

    def __init__(self, annotations: Sequence[Mapping[str, Sequence[str]]]) -> None:
        known = {emoji.replace("\ufe0f", ""): words for table in annotations for emoji, words in table.items()}
        uses = Counter(word for words in known.values() for word in set(words))
        self.known = {emoji: [word for word in words if uses[word] <= _MAX_SHARING] for emoji, words in known.items()}

    def __call__(self, drawing: IconDrawing) -> Sequence[str]:
        """Return a few keywords of a drawing other than its subject; () for toned drawings."""
        if drawing.emoji is None or drawing.tones:
            return ()
        words = self.known.get(drawing.emoji.replace("\ufe0f", ""), ())
        return [word for word in words if word.lower() != drawing.subject][:_MAX_KEYWORDS]
