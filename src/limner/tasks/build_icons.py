"""Write the icons to disk as a data set: `limner data icons OUT FILE...`.

Each drawing is a sample. Some drawings are also the upper half of pairs: the lower half is the same subject in another
style, or the same drawing changed. A pair never shows a held-out combination. One pair in twenty is held out, chosen by
a hash of its content; its two drawings are in training.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from PIL import ImageColor

from limner.data.image_encode import image_bytes
from limner.data.sample import Rejected
from limner.data.shard_writer import ShardWriter
from limner.errors import UserError, did_you_mean
from limner.progress import Advance
from limner.tasks.iconify import IconSet
from limner.tasks.icons import IconDrawing, Keywords, article, captions, join_sets, noun, stable_hash
from limner.tasks.svg import SVGRenderer
from limner.validation import InvalidSetting, Range, Validated

#: Colors for recolored drawings: red, green and blue, from 0 to 255.
RECOLORS = {
    "red": (230, 40, 40),
    "orange": (245, 140, 20),
    "green": (40, 160, 60),
    "blue": (40, 90, 220),
    "pink": (240, 90, 170),
}
#: Words for the lower half by kind of pair; those of other kinds name the style or the color.
_CHANGES = {"upside down": "upside down", "silhouette": "as a silhouette", "grayscale": "in grayscale"}
_PAIR_KINDS = ("style", "style", "style", *_CHANGES, "recolored")


@dataclass(frozen=True, kw_only=True)
class IconDataSettings(Validated):
    """Settings of a data set of icons."""

    size: Annotated[int, Range(16, 1_024)] = 64
    """Side of the pictures in pixels, an even number."""
    margin: Annotated[int, Range(0, 256)] = 0
    """Empty border in pixels, so that random crops in training do not cut the drawing; half as wide in pairs."""
    background: str = "white"
    """Background color in CSS syntax, such as white or #ffeecc."""
    pairs: Annotated[float, Range(0, 100)] = 0.25
    """Mean number of pairs per drawing as the top half ("the exact same tiger on the top as a line drawing at the
    bottom"): with 0.25, every fourth drawing is the top of one pair. A drawing has at most eight, and one more for each
    other style."""
    tones: Annotated[int, Range(0, 100)] = 1
    """Maximum number of skin-tone variants per subject and style, in addition to the drawing without a tone."""
    styles: Annotated[int, Range(1, 1_000)] = 1
    """Leave out subjects that exist in fewer styles; many subjects in few styles need much memorization."""
    categories: tuple[str, ...] = ()
    """Keep only subjects that a set lists in one of these categories, such as "Food & Drink"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size % 2:
            raise InvalidSetting("size", f"must be even, not {self.size}")
        if 4 * self.margin > self.size:
            raise InvalidSetting("margin", f"must be at most a quarter of size, {self.size // 4}, not {self.margin}")
        try:
            ImageColor.getrgb(self.background)
        except ValueError:
            problem = f"must be a CSS color such as white or #ffeecc, not {self.background!r}"
            raise InvalidSetting("background", problem) from None


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

    def captions(self) -> tuple[str, ...]:
        a_subject = article(self.above.subject)
        return (
            f"the exact same {self.above.subject} on the top {self.caption} at the bottom",
            f"{a_subject}, {self.above.style}, on the top, and the same thing {self.caption} at the bottom",
            f"the exact same thing on the top {self.caption} at the bottom",
        )


def write_icons(
    out: str | os.PathLike[str],
    sets: Sequence[IconSet],
    settings: IconDataSettings = IconDataSettings(),
    *,
    keywords: Sequence[Mapping[str, Sequence[str]]] = (),
    progress: Advance | None = None,
) -> dict[str, Any]:
    """Write shards of PNG, captions and metadata. Return a summary with counts of joined drawings and splits.

    `keywords` are CLDR's keywords by emoji. `progress` is called with 1 after every drawing, rejected ones included,
    and with the number left out.

    Raises `UserError` for an unknown category, or if no drawing is left.
    """
    every_drawing, rejected = join_sets(sets)
    drawings = _select(every_drawing, settings, rejected)
    if progress:
        progress(len(every_drawing) - len(drawings))
    keywords_of, partners = Keywords(keywords), defaultdict[str, list[IconDrawing]](list)
    for drawing in drawings:
        if not drawing.held_out:
            partners[drawing.subject].append(drawing)
    joined, kinds = Counter[str](), Counter[str]()
    with ShardWriter(out) as writer, SVGRenderer() as renderer:
        writer.counts.rejected.update({reason: count for reason, count in rejected.items() if count})

        def write(sample: IconDrawing | IconPair, phrases: Sequence[str], prefix: str = "") -> bool:
            """Write a sample, and return True if it can be drawn."""
            try:
                picture = _render(renderer, sample, settings)
            except Rejected as rejection:
                writer.counts.rejected[prefix + rejection.reason] += 1
                return False
            writer.write(image_bytes(picture), phrases, sample.metadata)
            return True

        for drawing in drawings:
            if write(drawing, captions(drawing, keywords_of(drawing))):
                joined["joined" if drawing.emoji else "not joined"] += 1
                kinds[drawing.held_out or "train"] += 1
                kinds.update(
                    "held-out pair" if pair.held_out else "pair"
                    for pair in _sample_pairs(drawing, partners[drawing.subject], settings.pairs)
                    if write(pair, pair.captions(), "half of a pair: ")
                )
            if progress:
                progress(1)
        if not writer.counts.kept:
            reasons = ", ".join(f"{reason}: {n}" for reason, n in writer.counts.rejected.items())
            raise UserError(f"these sets have nothing to draw ({reasons or 'they are empty'}): name other sets")
    return {**writer.summary(), "subjects": len(partners), "joined": dict(joined), "kinds": dict(kinds)}


def _select(
    drawings: Sequence[IconDrawing], settings: IconDataSettings, rejected: Counter[str]
) -> Sequence[IconDrawing]:
    """Return the drawings to write, and count the others by reason. Raises `UserError` for an unknown category."""

    def keep(reason: str, condition: Callable[[IconDrawing], bool]) -> None:
        nonlocal drawings
        kept = [drawing for drawing in drawings if condition(drawing)]
        rejected[reason] += len(drawings) - len(kept)
        drawings = kept

    known = dict.fromkeys(drawing.category for drawing in drawings if drawing.category)
    for category in settings.categories:
        if category not in known:
            raise UserError(f"no set has a category {category!r}: {did_you_mean(category, known)}")
    bases = {drawing.base for drawing in drawings if drawing.category in settings.categories}
    if settings.categories:
        keep("subject of another category", lambda drawing: drawing.base in bases)
    styles = Counter(base for base, _ in {(drawing.base, drawing.style) for drawing in drawings})
    keep("subject in too few styles", lambda drawing: styles[drawing.base] >= settings.styles)
    toned = defaultdict[tuple[str, str], list[IconDrawing]](list)
    for drawing in sorted(drawings, key=lambda drawing: stable_hash("tone", drawing.subject, drawing.style)):
        if drawing.tones:
            toned[drawing.base, drawing.style].append(drawing)
    extra = {(tone.subject, tone.style) for group in toned.values() for tone in group[settings.tones :]}
    keep("additional skin tone", lambda drawing: (drawing.subject, drawing.style) not in extra)
    return drawings


def _sample_pairs(above: IconDrawing, partners: Iterable[IconDrawing], number: float) -> Iterator[IconPair]:
    """Sample `number` different pairs, on average: three in seven join two styles, while other styles are left."""
    rng = np.random.default_rng(stable_hash("pairs", above.subject, above.style))
    if above.held_out:
        return
    count = int(number) + (rng.random() < number % 1)
    available: dict[str, list[Any]] = {kind: [None] for kind in _CHANGES}
    available["style"] = [drawing for drawing in partners if drawing.style != above.style]
    available["recolored"] = list(RECOLORS)
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
            yield IconPair(above, kind, _CHANGES[kind])


def _render(renderer: SVGRenderer, sample: IconDrawing | IconPair, settings: IconDataSettings) -> np.ndarray:
    """Render a drawing, or a pair of drawings of half the side, uint8 [size, size, 3]. Raises `Rejected`."""

    def draw(drawing: IconDrawing, factor: int = 1) -> np.ndarray:
        svg = drawing.set.svg(drawing.icon)
        return renderer.render(svg, settings.size // factor, settings.background, settings.margin // factor)

    if isinstance(sample, IconDrawing):
        picture = draw(sample)
        if picture.reshape(-1, 3).std(0).max() < 1:
            raise Rejected("empty drawing")
        return picture
    background = np.array(ImageColor.getrgb(settings.background)[:3])
    above = draw(sample.above, 2)
    below = draw(sample.below, 2) if sample.below else _changed(above, sample, background)
    canvas = np.empty((settings.size, settings.size, 3), np.uint8)
    canvas[:] = background
    left = (settings.size - len(above)) // 2
    canvas[:, left : left + len(above)] = np.concatenate([above, below])
    return canvas


def _changed(picture: np.ndarray, pair: IconPair, background: np.ndarray) -> np.ndarray:
    """Return the lower half of a pair without a second drawing."""
    if pair.kind == "upside down":
        return picture[::-1]
    gray = picture @ np.array([0.299, 0.587, 0.114])[:, None]
    if pair.kind == "grayscale":
        return np.rint(np.repeat(gray, 3, -1)).astype(np.uint8)
    alpha = np.clip(np.abs(picture.astype(float) - background).max(-1, keepdims=True) / 32, 0, 1)
    tint: np.ndarray | float = 0.0  # black, of a silhouette
    if pair.color:  # keep light and dark, in one color
        tint = np.clip(255 - (255 - np.asarray(RECOLORS[pair.color])) * (1.2 - 0.8 * gray / 255), 0, 255)
    return np.rint(tint * alpha + background * (1 - alpha)).astype(np.uint8)
