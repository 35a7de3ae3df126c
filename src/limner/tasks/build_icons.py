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
from limner.errors import UserError, did_you_mean
from limner.progress import Advance
from limner.tasks.icon_captions import CHANGES, Keywords, captions, noun, pair_captions
from limner.tasks.iconify import IconSet
from limner.tasks.icons import IconDrawing, join_sets, stable_hash
from limner.tasks.svg_renderer import SVGRenderer

#: Colors for recolored drawings: red, green and blue, from 0 to 255.
RECOLORS = {
    "red": (230, 40, 40),
    "orange": (245, 140, 20),
    "green": (40, 160, 60),
    "blue": (40, 90, 220),
    "pink": (240, 90, 170),
}
_PAIR_KINDS = ("style", "style", "style", *CHANGES, "recolored")
_Partition = tuple[list[IconDrawing], list[IconDrawing]]


@dataclass(frozen=True)
class IconPair:
    """A pair of drawings. `below` is the lower one, or None for a changed `above`; `caption` describes the change."""

    above: IconDrawing
    kind: str
    caption: str
    below: IconDrawing | None = None
    color: str | None = None

    @property
    def held_out(self) -> bool:
        return stable_hash("pair", self.above.base, self.above.style, self.caption) % 20 == 0

    @property
    def metadata(self) -> dict[str, Any]:
        pair: dict[str, Any] = {"kind": self.kind, "caption": self.caption}
        if self.below:
            pair |= {key: self.below.metadata[key] for key in ("style", "set", "name", "license", "author", "source")}
        split = {"split": "held-out", "held_out": "pair"} if self.held_out else {"split": "train"}
        return {**self.above.metadata, **split, "pair": pair}


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
        raise UserError(f"{background!r} is not a CSS color: use one such as white or #ffeecc") from None
    drawings, rejected = join_sets(sets)
    drawings, uncategorized = _split_by_category(drawings, categories)
    rejected["subject of another category"] += len(uncategorized)
    drawings, rare = _split_by_style_count(drawings, styles)
    rejected["subject in too few styles"] += len(rare)
    drawings, extra_tones = _limit_tones(drawings, tones)
    rejected["additional skin tone"] += len(extra_tones)
    if progress:
        progress(len(uncategorized) + len(rare) + len(extra_tones))
    keywords_of, partners = Keywords.from_annotations(keywords), defaultdict[str, list[IconDrawing]](list)
    for drawing in drawings:
        if not drawing.held_out:
            partners[drawing.subject].append(drawing)
    joined, kinds = Counter[str](), Counter[str]()
    with ShardWriter(out) as writer, SVGRenderer() as renderer:
        writer.rejected.update({reason: count for reason, count in rejected.items() if count})
        for drawing in drawings:
            try:
                picture = renderer.render(drawing.set.svg(drawing.icon), size, background, margin)
                if picture.reshape(-1, 3).std(0).max() < 1:
                    raise Rejected("empty drawing")
                writer.write(image_bytes(picture), captions(drawing, keywords_of(drawing)), drawing.metadata)
            except Rejected as rejection:
                writer.reject(rejection.reason)
            else:
                joined["joined" if drawing.emoji else "not joined"] += 1
                kinds[drawing.held_out or "train"] += 1
                for pair in _sample_pairs(drawing, partners[drawing.subject], pairs):
                    try:
                        picture = _render_pair(renderer, pair, size, margin, background)
                    except Rejected as rejection:
                        writer.reject(f"half of a pair: {rejection.reason}")
                        continue
                    writer.write(image_bytes(picture), pair_captions(drawing, pair.caption), pair.metadata)
                    kinds["held-out pair" if pair.held_out else "pair"] += 1
            if progress:
                progress(1)
        if not writer.kept:
            reasons = ", ".join(f"{reason}: {n}" for reason, n in writer.rejected.items())
            raise UserError(f"these sets have nothing to draw ({reasons or 'they are empty'}): name other sets")
    return {**writer.summary(), "subjects": len(partners), "joined": dict(joined), "kinds": dict(kinds)}


def _split_by_category(drawings: Sequence[IconDrawing], categories: Sequence[str]) -> _Partition:
    """Divide drawings by the category of their base in any set. Raises `UserError` for an unknown category."""
    if not categories:
        return list(drawings), []
    known = dict.fromkeys(drawing.category for drawing in drawings if drawing.category)
    for category in categories:
        if category not in known:
            raise UserError(f"no set has a category {category!r}: {did_you_mean(category, known)}")
    bases = {drawing.base for drawing in drawings if drawing.category in categories}
    return _partition(drawings, lambda drawing: drawing.base in bases)


def _split_by_style_count(drawings: Sequence[IconDrawing], styles: int) -> _Partition:
    """Divide drawings by the number of styles of their base: at least `styles`, and fewer."""
    by_base = defaultdict[str, set[str]](set)
    for drawing in drawings:
        by_base[drawing.base].add(drawing.style)
    return _partition(drawings, lambda drawing: len(by_base[drawing.base]) >= styles)


def _limit_tones(drawings: Sequence[IconDrawing], max_tones: int) -> _Partition:
    """Divide drawings: the untoned, with up to `max_tones` toned ones per base and style by hash, and the rest."""
    toned = defaultdict[tuple[str, str], list[IconDrawing]](list)
    for drawing in drawings:
        if drawing.tones:
            toned[drawing.base, drawing.style].append(drawing)
    dropped = {
        (drawing.subject, drawing.style)
        for group in toned.values()
        for drawing in sorted(group, key=lambda item: stable_hash("tone", item.subject, item.style))[max_tones:]
    }
    return _partition(drawings, lambda drawing: (drawing.subject, drawing.style) not in dropped)


def _partition(drawings: Sequence[IconDrawing], keep: Callable[[IconDrawing], bool]) -> _Partition:
    """Divide drawings into those that pass `keep` and the rest."""
    kept, others = [], []
    for drawing in drawings:
        (kept if keep(drawing) else others).append(drawing)
    return kept, others


def _sample_pairs(above: IconDrawing, partners: Sequence[IconDrawing], number: float) -> Iterator[IconPair]:
    """Sample `number` different pairs, on average: three in seven join two styles, while other styles are left."""
    rng = np.random.default_rng(stable_hash("pairs", above.subject, above.style))
    if above.held_out:
        return
    count = int(number) + (rng.random() < number % 1)
    others = [drawing for drawing in partners if drawing.style != above.style]
    available: dict[str, list[Any]] = {kind: [None] for kind in CHANGES}
    available |= {"style": others, "recolored": list(RECOLORS)}
    while count and any(available.values()):
        kind = _PAIR_KINDS[rng.integers(len(_PAIR_KINDS))]
        if not available[kind]:
            continue
        below = available[kind].pop(rng.integers(len(available[kind])))
        count -= 1
        if kind == "style":
            yield IconPair(above, kind, f"as a {noun(below.style)}", below)
        elif kind == "recolored":
            yield IconPair(above, kind, f"in {below}", color=below)
        else:
            yield IconPair(above, kind, CHANGES[kind])


def _render_pair(renderer: SVGRenderer, pair: IconPair, size: int, margin: int, background: str) -> np.ndarray:
    """Render a pair, two drawings of half the side, as uint8 [size, size, 3]. Raises `Rejected`."""
    half = size // 2
    above = renderer.render(pair.above.set.svg(pair.above.icon), half, background, margin // 2)
    if pair.below:
        below = renderer.render(pair.below.set.svg(pair.below.icon), half, background, margin // 2)
    else:
        below = _changed(above, pair, np.asarray(ImageColor.getrgb(background)[:3]))
    canvas = np.empty((size, size, 3), np.uint8)
    canvas[:] = ImageColor.getrgb(background)[:3]
    left = (size - half) // 2
    canvas[:half, left : left + half], canvas[half : 2 * half, left : left + half] = above, below
    return canvas


def _changed(picture: np.ndarray, pair: IconPair, background: np.ndarray) -> np.ndarray:
    if pair.kind == "upside down":
        return picture[::-1]
    distance = np.abs(picture.astype(float) - background).max(-1, keepdims=True)
    if pair.kind == "silhouette":
        alpha = np.clip(distance / 32, 0, 1)
        return np.rint(background * (1 - alpha)).astype(np.uint8)
    gray = picture @ np.array([0.299, 0.587, 0.114])[:, None]
    if pair.kind == "grayscale":
        return np.rint(np.repeat(gray, 3, -1)).astype(np.uint8)
    alpha = np.clip(distance / 32, 0, 1)  # keep light and dark, in one color
    tint = 255 - (255 - np.asarray(RECOLORS[pair.color or "red"])) * (1.2 - 0.8 * gray / 255)
    return np.rint(np.clip(tint, 0, 255) * alpha + background * (1 - alpha)).astype(np.uint8)
