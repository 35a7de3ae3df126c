"""Write the icons to disk as a data set: `limner data icons OUT FILE...`.

Each drawing is a sample. Some drawings are also the upper half of pairs: the lower half is the same subject in another
style, or the same drawing changed. A pair never shows a held-out combination. One pair in twenty is held out, chosen by
a hash of its content; its two drawings are in training.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import ImageColor

from limner.data.image_encode import image_bytes
from limner.data.sample import Rejected
from limner.data.shard_writer import ShardWriter
from limner.errors import UserError, suggestion
from limner.progress import Advance
from limner.tasks.icon_captions import CHANGES, Keywords, captions, noun, pair_captions
from limner.tasks.iconify import IconSet
from limner.tasks.icons import Drawn, stable, world
from limner.tasks.svg_renderer import SVGRenderer

#: Colors for recolored drawings: red, green and blue, from 0 to 255.
INKS = {
    "red": (230, 40, 40),
    "orange": (245, 140, 20),
    "green": (40, 160, 60),
    "blue": (40, 90, 220),
    "pink": (240, 90, 170),
}
_KINDS = ("style", "style", "style", *CHANGES, "recolored")


@dataclass(frozen=True)
class Pair:
    """A pair of drawings. `below` is the lower one, or None for a changed `above`; `caption` describes the change."""

    above: Drawn
    kind: str
    caption: str
    below: Drawn | None = None
    ink: str | None = None

    @property
    def held_out(self) -> bool:
        return stable("pair", self.above.base, self.above.style, self.caption) % 20 == 0

    @property
    def facts(self) -> dict[str, Any]:
        told: dict[str, Any] = {"kind": self.kind, "caption": self.caption}
        if self.below:
            told |= {key: self.below.facts[key] for key in ("style", "set", "name", "license", "author", "source")}
        split = {"split": "held-out", "held_out": "pair"} if self.held_out else {"split": "train"}
        return {**self.above.facts, **split, "pair": told}


def write_icons(
    out: str | os.PathLike[str],
    sets: Sequence[IconSet],
    *,
    keywords: Sequence[Mapping[str, Sequence[str]]] = (),
    size: int = 64,
    margin: int = 0,
    background: str = "white",
    pairs: float = 0.25,
    tones: int = 1,
    styles: int = 1,
    categories: Sequence[str] = (),
    progress: Advance | None = None,
) -> dict[str, Any]:
    """Write shards of PNG, captions and metadata. Return a summary with counts of joined drawings and splits.

    Args:
        keywords: CLDR's keywords by emoji.
        size: side of the pictures in pixels, an even number.
        margin: empty pixels around a drawing, so that random crops in training do not cut it; half as many in pairs.
        pairs: average number of pairs per drawing: 0.25 gives every fourth drawing one. Each has at most
            eight, and one more for each other style.
        tones: largest number of skin tones of each base and style.
        styles: leave out subjects with fewer styles.
        categories: leave out subjects of other categories, such as "Food & Drink"; an empty list keeps all.
        progress: called with 1 after every drawing, rejected ones included, and with the number left out.

    Raises `UserError` for an invalid `background`, an unknown category, or if no drawing is left.
    """
    try:
        ImageColor.getrgb(background)
    except ValueError:
        raise UserError(f"{background!r} is no color: name one of CSS, as white or #ffeecc") from None
    drawn, rejected = world(sets)
    drawn, others = _filed(drawn, categories)
    rejected["a subject of another category"] += len(others)
    drawn, rare = _common(drawn, styles)
    rejected["a subject in too few styles"] += len(rare)
    drawn, more = _fewer_tones(drawn, tones)
    rejected["a further skin tone"] += len(more)
    if progress:
        progress(len(others) + len(rare) + len(more))
    known, partners = Keywords.of(keywords), defaultdict[str, list[Drawn]](list)
    for one in drawn:
        if not one.held_out:
            partners[one.subject].append(one)
    joined, kinds = Counter[str](), Counter[str]()
    with ShardWriter(out) as writer, SVGRenderer() as renderer:
        writer.rejected.update({reason: count for reason, count in rejected.items() if count})
        for one in drawn:
            try:
                picture = renderer.draw(one.set.svg(one.icon), size, background, margin)
                if picture.reshape(-1, 3).std(0).max() < 1:
                    raise Rejected("a drawing of nothing")
                writer.write(image_bytes(picture), captions(one, known(one)), one.facts)
            except Rejected as defect:
                writer.reject(defect.reason)
            else:
                joined["joined" if one.emoji else "not joined"] += 1
                kinds[one.held_out or "train"] += 1
                for pair in _pairs(one, partners[one.subject], pairs):
                    try:
                        picture = _halves(renderer, pair, size, margin, background)
                    except Rejected as defect:
                        writer.reject(f"half of a pair: {defect.reason}")
                        continue
                    writer.write(image_bytes(picture), pair_captions(one, pair.caption), pair.facts)
                    kinds["held-out pair" if pair.held_out else "pair"] += 1
            if progress:
                progress(1)
        if not writer.kept:
            reasons = ", ".join(f"{reason}: {n}" for reason, n in writer.rejected.items())
            raise UserError(f"there is nothing to draw in these sets ({reasons or 'they are empty'})")
    return {**writer.summary(), "subjects": len(partners), "joined": dict(joined), "kinds": dict(kinds)}


def _filed(drawn: Sequence[Drawn], categories: Sequence[str]) -> tuple[list[Drawn], list[Drawn]]:
    """Divide drawings by the category of their base in any set. Raises `UserError` for an unknown category."""
    if not categories:
        return list(drawn), []
    known = dict.fromkeys(one.category for one in drawn if one.category)
    for category in categories:
        if category not in known:
            raise UserError(f"no set has a category {category!r}: {suggestion(category, known)}")
    bases = {one.base for one in drawn if one.category in categories}
    return _parted(drawn, lambda one: one.base in bases)


def _common(drawn: Sequence[Drawn], styles: int) -> tuple[list[Drawn], list[Drawn]]:
    """Divide drawings by the number of styles of their base: at least `styles`, and fewer."""
    of = defaultdict[str, set[str]](set)
    for one in drawn:
        of[one.base].add(one.style)
    return _parted(drawn, lambda one: len(of[one.base]) >= styles)


def _fewer_tones(drawn: Sequence[Drawn], most: int) -> tuple[list[Drawn], list[Drawn]]:
    """Keep untoned drawings, and up to `most` toned ones per base and style, chosen by a hash; return kept and rest."""
    toned = defaultdict[tuple[str, str], list[Drawn]](list)
    for one in drawn:
        if one.tones:
            toned[one.base, one.style].append(one)
    dropped = {
        (one.subject, one.style)
        for some in toned.values()
        for one in sorted(some, key=lambda one: stable("tone", one.subject, one.style))[most:]
    }
    return _parted(drawn, lambda one: (one.subject, one.style) not in dropped)


def _parted(drawn: Sequence[Drawn], keep: Callable[[Drawn], bool]) -> tuple[list[Drawn], list[Drawn]]:
    """Divide drawings into those that pass `keep` and the rest."""
    kept, others = [], []
    for one in drawn:
        (kept if keep(one) else others).append(one)
    return kept, others


def _pairs(above: Drawn, partners: Sequence[Drawn], number: float) -> Iterator[Pair]:
    """Sample `number` different pairs, on average: three in seven join two styles, while other styles are left."""
    rng = np.random.default_rng(stable("pairs", above.subject, above.style))
    if above.held_out:
        return
    count = int(number) + (rng.random() < number % 1)
    others = [one for one in partners if one.style != above.style]
    left: dict[str, list[Any]] = {"style": others, **{kind: [None] for kind in CHANGES}, "recolored": list(INKS)}
    while count and any(left.values()):
        kind = _KINDS[rng.integers(len(_KINDS))]
        if not left[kind]:
            continue
        below = left[kind].pop(rng.integers(len(left[kind])))
        count -= 1
        if kind == "style":
            yield Pair(above, kind, f"as a {noun(below.style)}", below)
        elif kind == "recolored":
            yield Pair(above, kind, f"in {below}", ink=below)
        else:
            yield Pair(above, kind, CHANGES[kind])


def _halves(renderer: SVGRenderer, pair: Pair, size: int, margin: int, background: str) -> np.ndarray:
    """Render a pair, two drawings of half the side, as uint8 [size, size, 3]. Raises `Rejected`."""
    half = size // 2
    above = renderer.draw(pair.above.set.svg(pair.above.icon), half, background, margin // 2)
    if pair.below:
        below = renderer.draw(pair.below.set.svg(pair.below.icon), half, background, margin // 2)
    else:
        below = _changed(above, pair, np.asarray(ImageColor.getrgb(background)[:3]))
    canvas = np.empty((size, size, 3), np.uint8)
    canvas[:] = ImageColor.getrgb(background)[:3]
    left = (size - half) // 2
    canvas[:half, left : left + half], canvas[half : 2 * half, left : left + half] = above, below
    return canvas


def _changed(picture: np.ndarray, pair: Pair, background: np.ndarray) -> np.ndarray:
    if pair.kind == "upside down":
        return picture[::-1]
    ink = np.abs(picture.astype(float) - background).max(-1, keepdims=True)  # distance from the background
    if pair.kind == "silhouette":
        alpha = np.clip(ink / 32, 0, 1)
        return np.rint(background * (1 - alpha)).astype(np.uint8)
    gray = picture @ np.array([0.299, 0.587, 0.114])[:, None]
    if pair.kind == "grayscale":
        return np.rint(np.repeat(gray, 3, -1)).astype(np.uint8)
    alpha = np.clip(ink / 32, 0, 1)  # keep light and dark, in one color
    tint = 255 - (255 - np.asarray(INKS[pair.ink or "red"])) * (1.2 - 0.8 * gray / 255)
    return np.rint(np.clip(tint, 0, 255) * alpha + background * (1 - alpha)).astype(np.uint8)
