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
from dataclasses import dataclass
from typing import Literal

from limner.tasks.emoji import Emoji, all_emoji, other_names
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
_MANY = 4  # least number of styles of a base that may be held out


@dataclass(frozen=True)
class Drawn:
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
    def facts(self) -> dict[str, object]:
        """The metadata of the drawing in a shard."""
        told = {
            "subject": self.subject, "style": self.style, "set": self.set.prefix, "name": self.icon.name,
            "base": self.base, "tones": list(self.tones), "emoji": self.emoji, "category": self.category,
            "license": self.set.license, "author": self.set.author, "source": self.set.source,
            "split": "held-out" if self.held_out else "train", "held_out": self.held_out,
        }  # fmt: skip
        return {key: value for key, value in told.items() if value is not None}


def world(sets: Sequence[IconSet]) -> tuple[list[Drawn], Counter[str]]:
    """Return the drawings of all sets, one of each subject and style, and the number left out by reason."""
    known = _Subjects(sets)
    drawn: dict[tuple[str, str], Drawn] = {}
    rejected = sum((Counter(one.rejected) for one in sets), Counter[str]())
    for one in sets:
        style = STYLES.get(one.prefix, one.title.lower())
        for icon in one.icons.values():
            emoji = known.find(one, icon)
            name = _plain(icon.name) if emoji is None else _name(emoji)
            if not name:
                rejected["a name without a caption"] += 1
                continue
            base, tones = (name, ()) if emoji is None else (_base(emoji), emoji.tones)
            found = Drawn(one, icon, style, name, base, tones, emoji and emoji.text, one.category(icon))
            if (name, style) in drawn:
                rejected["the same subject in the same style again"] += 1
            drawn.setdefault((name, style), found)
    return _split(list(drawn.values())), rejected


def _split(drawn: list[Drawn]) -> list[Drawn]:
    styles: defaultdict[str, set[str]] = defaultdict(set)
    for one in drawn:
        styles[one.base].add(one.style)
    kept_back: dict[tuple[str, str], HeldOut] = {}
    for base, theirs in styles.items():
        if len(theirs) >= _MANY:
            if stable("subject", base) % 100 == 0:
                kept_back |= {(base, style): "subject" for style in theirs}
            elif stable("combination", base) % 20 == 0:
                kept_back[base, sorted(theirs)[stable("style", base) % len(theirs)]] = "combination"
    held = {(one.set.prefix, one.icon.root): kind for one in drawn if (kind := kept_back.get((one.base, one.style)))}
    return [Drawn(**{**one.__dict__, "held_out": held.get((one.set.prefix, one.icon.root))}) for one in drawn]


def stable(*parts: str) -> int:
    """Return a 64-bit hash of the texts, equal in every process."""
    return int.from_bytes(hashlib.sha256("|".join(parts).encode()).digest()[:8], "big")


class _Subjects:
    """An index of emoji by code points and by name."""

    def __init__(self, sets: Sequence[IconSet]) -> None:
        self.by_codes = {_codes(one.text): one for one in all_emoji()}
        self.by_name: dict[str, Emoji] = {}
        for one in self.by_codes.values():
            self.by_name.setdefault(_key(one.name), one)
        for text, names in other_names().items():
            for name in names:
                self.by_name.setdefault(_key(name), self.by_codes[_codes(text)])
        for one in sets:
            for name, codes in one.codes.items():
                if emoji := self.by_codes.get(_without_selectors(codes)):
                    self.by_name.setdefault(_key(name), emoji)

    def find(self, one: IconSet, icon: Icon) -> Emoji | None:
        names = one.names(icon)
        told = [self.by_codes.get(_without_selectors(one.codes[name])) for name in names if name in one.codes]
        named = [self.by_name.get(_key(name)) for name in names]
        return next((emoji for emoji in (*told, *named) if emoji), None)


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
