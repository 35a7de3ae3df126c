"""Joint data set of monochrome icons: subjects and styles from the names that icon sets use, captions and a split.

A name such as "rocket-launch-thin" has a subject, "rocket launch", and a variant, "thin", which the set declares. A
style is a set and a variant, "phosphor thin". Sets that declare no variants use common words ("-outline", "-fill").
Sizes ("24-filled") are not part of a style: the drawing closest to 24 pixels is used. Brands, flags, animations, sets
that the catalog archived or hides, and sets in fixed colors are left out.

Split. Four **sets** are held out, to learn a style from examples. Of the subjects in ten or more styles, a hundred, and
at most one in twenty, are held out in all styles, a whole **subject**. One in twenty of the other **combinations** of
subject and style is held out where the subject has six or more styles: subject and style are seen, not together.
Choices are hashes of names. Drawings with equal pixels are on one side of the split.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from limner.tasks.iconify import Icon, IconSet
from limner.tasks.icons import article, stable_hash, to_words

HeldOut = Literal["set", "subject", "combination"]

#: Sets that no training sees: lines, lines and fills, lines with a second gray level, and a coarse grid of 15 pixels.
HELD_OUT_SETS = ("uil", "basil", "si", "teenyicons")
HELD_OUT_SUBJECTS = 100
MIN_STYLES_COMBINATION, MIN_STYLES_SUBJECT = 6, 10  # of a subject that may be held out in one style, in all styles

#: Last words of names that are variants in a set that declares none, if many names have them.
_VARIANTS = (
    "outline", "outlined", "line", "linear", "fill", "filled", "solid", "bold", "thin", "light", "duotone", "twotone",
    "sharp", "rounded", "round",
)  # fmt: skip
_MANY = 20
_OMITTED_KINDS = frozenset(["Logos", "Emoji", "Flags / Maps", "Programming", "Archive / Unmaintained"])
_OMITTED_CATEGORIES = re.compile(r"\b(brands?|logos?|flags?)\b", re.IGNORECASE)
_OMITTED_NAMES = re.compile(r"(?:^|-)(?:brand|logo)s?(?:-|$)")
_FILLERS = frozenset(["icon", "icons", "free", "set", "svg"])  # words of titles that say nothing about a style
_SIZE = re.compile(r"(\d+)(px|x\d+)?")
_IDEAL_SIZE = 24  # pixels; the size that most sets are drawn for
_MAX_ALIASES = 2  # of a subject in captions
_DUOTONE = 0.12  # least share of ink at a medium gray level
_REGULAR, _BOLD, _FILLED = 1.3, 2.15, 2.7  # least stroke width, in 1 / 24 of the side


@dataclass(frozen=True)
class Glyph:
    """A drawing with its metadata.

    Attributes:
        icon: the drawing in its set.
        credit: "set", "license", "author" and "source".
        other_subjects: subjects of the drawing's other names.
        look: words for what the style looks like, such as "thin outline" (`describe_style`); "" before it is measured.
    """

    icon: Icon
    credit: Mapping[str, str]
    subject: str
    style: str
    other_subjects: tuple[str, ...] = ()
    category: str | None = None
    look: str = ""
    held_out: HeldOut | None = None

    @property
    def metadata(self) -> dict[str, object]:
        """The metadata of the drawing in a shard."""
        metadata = {
            "subject": self.subject, "style": self.style, "look": self.look, "name": self.icon.name,
            "category": self.category, **self.credit, "split": "held-out" if self.held_out else "train",
            "held_out": self.held_out, "same": [f"the same, {words}" for words in (self.style, self.look) if words],
        }  # fmt: skip
        return {key: value for key, value in metadata.items() if value}


def glyphs_of(icon_set: IconSet, rejected: Counter[str]) -> list[Glyph]:
    """Return the drawings of a set, one of each subject and style. Others are counted by reason in `rejected`."""
    rejected.update(icon_set.rejected)
    if icon_set.colored or icon_set.hidden or icon_set.kind in _OMITTED_KINDS:
        kind = f"set of another kind: {'hidden' if icon_set.hidden else icon_set.kind}"
        rejected["set in fixed colors" if icon_set.colored else kind] += len(icon_set.icons)
        return []
    title = " ".join(word for word in to_words(icon_set.title).split() if word not in _FILLERS) or icon_set.prefix
    parse, best = NameParser(icon_set), dict[tuple[str, str], tuple[int, Glyph]]()
    credit = {
        "set": icon_set.prefix, "license": icon_set.license, "author": icon_set.author, "source": icon_set.source
    }  # fmt: skip
    for icon in icon_set.icons.values():
        category = icon_set.category(icon)
        if _OMITTED_NAMES.search(icon.name) or _OMITTED_CATEGORIES.search(category or ""):
            rejected["brand or flag"] += 1
            continue
        subject, variant, size = parse(icon.name)
        if not subject:
            rejected["name without a subject"] += 1
            continue
        others = (parse(name)[:2] for name in icon_set.aliases.get(icon.name, ()))
        same_variant = dict.fromkeys(other for other, v in others if v == variant and other not in ("", subject))
        glyph = Glyph(icon, credit, subject, f"{title} {variant}".strip(), tuple(same_variant)[:_MAX_ALIASES], category)
        rank = abs(size - _IDEAL_SIZE)
        if (key := (subject, glyph.style)) in best:
            rejected["another size of the same drawing"] += 1
            if rank >= best[key][0]:
                continue
        best[key] = rank, glyph
    return [glyph for _, glyph in best.values()]


class NameParser:
    """Parser of the names of one set: a name -> (subject, variant, size in pixels).

    The size of a name without one is `_IDEAL_SIZE`. Sets that declare no variants use common words.
    """

    def __init__(self, icon_set: IconSet) -> None:
        names = icon_set.icons
        ends = Counter(end for head, _, end in (name.rpartition("-") for name in names) if head in names)
        self.prefixes, self.suffixes = icon_set.prefixes, icon_set.suffixes
        if not self.prefixes and not self.suffixes:
            self.suffixes = {word: word for word in _VARIANTS if ends[word] >= _MANY}

    def __call__(self, name: str) -> tuple[str, str, int]:
        suffix = max((s for s in self.suffixes if s and name.endswith(f"-{s}")), key=len, default="")
        prefix = max((p for p in self.prefixes if p and name.startswith(f"{p}-")), key=len, default="")
        variant = self.suffixes.get(suffix, "") or self.prefixes.get(prefix, "")
        stem = name.removesuffix(f"-{suffix}").removeprefix(f"{prefix}-")
        sizes = [int(match[1]) for match in _SIZE.finditer(f"{variant} {suffix}")]
        camel_case = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", _SIZE.sub("", variant))
        return to_words(stem), to_words(camel_case), sizes[0] if sizes else _IDEAL_SIZE


def select(glyphs: Sequence[Glyph], pixels: Sequence[bytes], min_styles: int, rejected: Counter[str]) -> list[int]:
    """Return the indices of the drawings to keep, and count the others by reason.

    `pixels` are hashes of the pictures. Kept are subjects in `min_styles` styles, and of drawings of one subject with
    equal pixels in one set, such as aliases of variants, the first.
    """
    unique: dict[tuple[str, str, bytes], int] = {}
    for i, (glyph, key) in enumerate(zip(glyphs, pixels, strict=True)):
        if unique.setdefault((glyph.credit["set"], glyph.subject, key), i) != i:
            rejected["equal to another variant of the same set"] += 1
    styles = Counter(glyphs[i].subject for i in unique.values())
    kept = [i for i in unique.values() if styles[glyphs[i].subject] >= min_styles]
    rejected["subject in too few styles"] += len(unique) - len(kept)
    return kept


def assign_splits(glyphs: Sequence[Glyph], pixels: Sequence[bytes]) -> list[Glyph]:
    """Return the drawings with `held_out` set. Drawings with equal `pixels` are on one side of the split."""
    styles = defaultdict[str, set[str]](set)
    for glyph in glyphs:
        if glyph.credit["set"] not in HELD_OUT_SETS:
            styles[glyph.subject].add(glyph.style)
    common = [subject for subject, names in styles.items() if len(names) >= MIN_STYLES_SUBJECT]
    ranked = sorted(common, key=lambda subject: stable_hash("subject", subject))
    subjects = set(ranked[: min(HELD_OUT_SUBJECTS, len(common) // 20)])

    def kind(glyph: Glyph) -> HeldOut | None:
        if glyph.credit["set"] in HELD_OUT_SETS:
            return "set"
        if glyph.subject in subjects:
            return "subject"
        frequent = len(styles[glyph.subject]) >= MIN_STYLES_COMBINATION
        return "combination" if frequent and stable_hash(glyph.subject, glyph.style) % 20 == 0 else None

    kinds = [kind(glyph) for glyph in glyphs]
    of_picture: dict[bytes, HeldOut | None] = {}
    for side in (None, "combination", "subject", "set"):  # the last one wins
        of_picture |= {key: side for key, held_out in zip(pixels, kinds, strict=True) if held_out == side}
    return [replace(glyph, held_out=of_picture[key]) for glyph, key in zip(glyphs, pixels, strict=True)]


# ---------------------------------------------------------------------------- what a style looks like


def describe_style(pictures: Iterable[np.ndarray]) -> str:
    """Describe a style by its drawings, uint8 [H, W], black on white: such as "thin outline" or "duotone".

    Measures are medians over the drawings: the share of ink at a medium gray level, and the stroke width
    2 A / P of a shape with area A and perimeter P, in units of 1 / 24 of the side. At 48 pixels the width of lucide's
    strokes of 2 units measures 2.02, and that of Phosphor's of 1.5 units 1.52.
    """
    grays, widths = [], []
    for picture in pictures:
        ink = 1 - picture.astype(np.float32) / 255
        # The total variation of a picture in two levels is the length of the border between them.
        y, x = np.gradient(ink)
        perimeter = float(np.hypot(x, y).sum())
        inner = (ink > 0.1) & (ink < 0.9) & (np.hypot(x, y) < 0.05)
        grays.append(inner.sum() / max(1, (ink > 0.1).sum()))
        widths.append(2 * float(ink.sum()) / max(perimeter, 1e-6) * 24 / len(picture))
    gray, width = float(np.median(grays)), float(np.median(widths))
    if gray > _DUOTONE:
        return "duotone"
    if width > _FILLED:
        return "filled"
    return f"{'thin' if width < _REGULAR else 'regular' if width < _BOLD else 'bold'} outline"


# ---------------------------------------------------------------------------- captions


def captions(glyph: Glyph) -> tuple[str, ...]:
    """Return captions of a drawing, the plain one first. The last ones name the look instead of the style, or use
    another subject."""
    subject, style = glyph.subject, glyph.style
    phrases = [f"{subject}, {style}", f"{article(subject)}, {style}", f"{style} icon of {article(subject)}"]
    if glyph.look:
        phrases += [f"{subject}, {style}, {glyph.look}", f"{subject}, {glyph.look}"]
    phrases += [f"{other}, {style}" for other in glyph.other_subjects]
    return tuple(dict.fromkeys(phrases))
