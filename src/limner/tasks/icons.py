"""Joint data set of icons: drawings of the same subjects by several artists, with styles and a split.

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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from limner.tasks.emoji import Emoji, all_emoji, emoji_aliases
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
            name = _plain(icon.name) if emoji is None else _name(emoji)
            if not name:
                rejected["name without words"] += 1
                continue
            base, tones = (name, ()) if emoji is None else (_base(emoji), emoji.tones)
            category = icon_set.category(icon)
            drawing = IconDrawing(icon_set, icon, style, name, base, tones, emoji and emoji.text, category)
            if (name, style) in drawings:
                rejected["duplicate subject and style"] += 1
            drawings.setdefault((name, style), drawing)
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


def stable_hash(*parts: str) -> int:
    """Return a 64-bit hash of the texts, equal in every process."""
    return int.from_bytes(hashlib.sha256("|".join(parts).encode()).digest()[:8], "big")


class _EmojiIndex:
    """An index of emoji by code points and by name."""

    def __init__(self, sets: Sequence[IconSet]) -> None:
        self.by_codes = {_codes(emoji.text): emoji for emoji in all_emoji()}
        self.by_name: dict[str, Emoji] = {}
        for emoji in self.by_codes.values():
            self.by_name.setdefault(_key(emoji.name), emoji)
        for text, names in emoji_aliases().items():
            for name in names:
                self.by_name.setdefault(_key(name), self.by_codes[_codes(text)])
        for icon_set in sets:
            for name, codes in icon_set.codes.items():
                if known := self.by_codes.get(_without_selectors(codes)):
                    self.by_name.setdefault(_key(name), known)

    def find(self, icon_set: IconSet, icon: Icon) -> Emoji | None:
        names = icon_set.names(icon)
        codes = (_without_selectors(icon_set.codes[name]) for name in names if name in icon_set.codes)
        matches = (*map(self.by_codes.get, codes), *(self.by_name.get(_key(name)) for name in names))
        return next((emoji for emoji in matches if emoji), None)


def _name(emoji: Emoji) -> str:
    """Return the subject: "tiger", "flag of France", "waving hand, medium skin tone"."""
    tones = " and ".join(dict.fromkeys(emoji.tones))
    return f"{_base(emoji)}, {tones} skin tone" if tones else _base(emoji)


def _base(emoji: Emoji) -> str:
    return f"flag of {emoji.name}" if emoji.is_flag else emoji.base


def _plain(name: str) -> str:
    """Return the words of an icon's name, in lower case."""
    return " ".join(re.sub(r"[^\w]+|_", " ", name).split()).lower()[:100]


def _key(name: str) -> str:
    """Return a name without case, spaces and punctuation, which differ between sets."""
    return re.sub(r"[\W_]+", "", name.lower().replace("&", "and"))


def _codes(text: str) -> str:
    return _without_selectors("-".join(f"{ord(c):x}" for c in text))


def _without_selectors(codes: str) -> str:
    """Return code points without the variation selector for color, which only some sets write."""
    return "-".join(code for code in str(codes).lower().split("-") if code.lstrip("0") != "fe0f")
