"""Captions of synthetic scenes: describe scenes in words, and parse captions.

`describe` samples one of many captions of a scene. `parse` turns a caption into a `ParsedCaption`, which can be
compared with a scene. `describe_pair` and `parse_pair` do the same for image-to-image captions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

import numpy as np

from limner.tasks import scenes
from limner.tasks.scenes import EXTENT, UNITS, Scene, SceneObject, ScenePair, Transform

Relation = Literal["above", "below", "left of", "right of"]

_NAMED = 0.95  # probability that a caption names sizes, and background
_RELATION_MARGIN = UNITS / 8  # least distance of two centers for a relation to hold, in units
_OPPOSITE: dict[Relation, Relation] = {
    "above": "below", "below": "above", "left of": "right of", "right of": "left of",
}  # fmt: skip
_NUMBERS = ("one", "two", "three", "four")
_PAIR = re.compile(r"the exact same (.+) on the top (.+) at the bottom")
_TRANSFORM_PHRASES: dict[str, Transform] = {
    "as a sketch": "sketch",
    "upside down": "upside down",
    "in grayscale": "grayscale",
}


def _noun(attributes: tuple[str, ...], rng: np.random.Generator, sized: bool, count: int = 1) -> str:
    size, fill, color, shape = attributes
    words = [size] if sized else []
    if fill != "solid" or rng.random() < 0.1:
        words.append(fill)
    words += [color, shape]
    if count > 1:
        return " ".join([_NUMBERS[count - 1], *words[:-1], _plural(shape)])
    return " ".join(["an" if words[0][0] in "aeiou" else "a", *words])


def describe(scene: Scene, rng: np.random.Generator, in_order: float = 0.0) -> str:
    """Sample a caption of a scene. A few captions leave out the sizes or the background.

    A caption with a relation ("above", "left of", ...) names either object first. With probability `in_order`,
    it names the upper or left one first.
    """
    body = _body(scene, rng, in_order)
    if rng.random() >= _NAMED:
        return body
    forms = (
        f"{body} on a {scene.background} background",
        f"{body} on a {scene.background} background",
        f"on a {scene.background} background, {body}",
        f"{body}, {scene.background} background",
    )
    return forms[rng.integers(len(forms))]


def _body(scene: Scene, rng: np.random.Generator, in_order: float = 0.0) -> str:
    """Describe the objects in random order; two different ones with a relation, if one holds."""
    sized = rng.random() < _NAMED
    objects = [scene.objects[i] for i in rng.permutation(len(scene.objects))]
    attributes = [item.attributes for item in objects]
    if len(set(attributes)) == 1:
        return _noun(attributes[0], rng, sized, len(attributes))
    nouns = [_noun(item, rng, sized) for item in attributes]
    if len(objects) == 2 and (relations := spatial_relations(objects[0], objects[1])):
        link: Relation = relations[rng.integers(len(relations))]
        if in_order and link in ("below", "right of") and rng.random() < in_order:
            nouns, link = nouns[::-1], _OPPOSITE[link]
        phrase = f"to the {link}" if link in ("left of", "right of") and rng.random() < 0.7 else link
        return f"{nouns[0]} {phrase} {nouns[1]}"
    return f"{', '.join(nouns[:-1])} and {nouns[-1]}"


def describe_pair(pair: ScenePair, rng: np.random.Generator) -> str:
    """Sample an image-to-image caption (Figure 14). Some say "scene" and do not describe it."""
    subject = "scene"
    if rng.random() < _NAMED:
        subject = f"{_body(pair.top, rng)} on a {pair.top.background} background"
        subject = subject.removeprefix("an ").removeprefix("a ")
    phrases = {transform: phrase for phrase, transform in _TRANSFORM_PHRASES.items()}
    phrase = phrases.get(pair.transform, f"colored {pair.color}")
    return f"the exact same {subject} on the top {phrase} at the bottom"


def spatial_relations(a: SceneObject, b: SceneObject) -> list[Relation]:
    """Return the relations of a to b; one holds if the boxes do not overlap along its axis."""
    gaps: dict[Relation, float] = {
        "above": b.y - a.y - EXTENT[a.size],
        "below": a.y - b.y - EXTENT[b.size],
        "left of": b.x - a.x - EXTENT[a.size],
        "right of": a.x - b.x - EXTENT[b.size],
    }
    return [relation for relation, gap in gaps.items() if gap >= 0]


def center_relations(a: SceneObject, b: SceneObject) -> list[Relation]:
    """Return the relations of a to b by their centers, which a drawing has to show."""
    (ax, ay), (bx, by) = a.center, b.center
    gaps: dict[Relation, float] = {"above": by - ay, "below": ay - by, "left of": bx - ax, "right of": ax - bx}
    return [relation for relation, gap in gaps.items() if gap >= _RELATION_MARGIN]


@dataclass(frozen=True, kw_only=True)
class ParsedCaption:
    """The content of a caption. `attributes` are (size, fill, color, shape) of each object; an unnamed size is None."""

    attributes: tuple[tuple[str | None, str, str, str], ...]
    relation: Relation | None = None  # of the first object to the second
    background: str | None = None

    def matches(self, scene: Scene) -> bool:
        """Return True if number, attributes, relation and background all match the scene."""
        if self.background not in (None, scene.background) or len(scene.objects) != len(self.attributes):
            return False
        return any(self._fits(order) for order in permutations(scene.objects))

    def _fits(self, objects: Sequence[SceneObject]) -> bool:
        for named, item in zip(self.attributes, objects, strict=True):
            if any(word not in (None, value) for word, value in zip(named, item.attributes, strict=True)):
                return False
        if self.relation is None:
            return True
        return self.relation in center_relations(*objects[:2])


def parse(caption: str) -> ParsedCaption | None:
    """Parse a caption of a synthetic scene; None for any other caption."""
    text = " ".join(caption.lower().replace(",", " , ").replace(".", " ").split())
    background = None
    for name in scenes.BACKGROUNDS:
        for form in (f"on a {name} background", f", {name} background", f"on {name}"):
            if background is None and form in text:
                background, text = name, text.replace(form, "")
    text = text.replace("to the left of", "left of").replace("to the right of", "right of")
    relation: Relation | None = None
    parts: list[str] = []
    for candidate in _OPPOSITE:
        if f" {candidate} " in text:
            if relation is not None:
                return None
            relation, parts = candidate, text.split(f" {candidate} ")
    if relation is None:
        parts = text.replace(" and ", " , ").split(",")
    attributes: list[tuple[str | None, str, str, str]] = []
    for part in filter(None, (part.strip(" ,") for part in parts)):
        if (named := _parse_noun(part)) is None:
            return None
        attributes += named
    if not 1 <= len(attributes) <= 4 or (relation and (len(parts) != 2 or len(attributes) != 2)):
        return None
    return ParsedCaption(attributes=tuple(attributes), relation=relation, background=background)


def _parse_noun(part: str) -> list[tuple[str | None, str, str, str]] | None:
    """Parse a noun phrase into the attributes of each of its objects; None for any other phrase."""
    words = part.removeprefix("there is ").removeprefix("there are ").split()
    if len(words) < 3 or words[0] not in ("a", "an", *_NUMBERS):
        return None
    count = _NUMBERS.index(words[0]) + 1 if words[0] in _NUMBERS else 1
    shape = next((shape for shape in scenes.SHAPES if words[-1] in (shape, _plural(shape))), None)
    adjectives = words[1:-1]
    size = next((w for w in adjectives if w in scenes.SIZES), None)
    fill = next((w for w in adjectives if w in scenes.FILLS), "solid")
    color = next((w for w in adjectives if w in scenes.COLORS), None)
    if shape is None or color is None or any(w not in (size, color, fill) for w in adjectives):
        return None
    return [(size, fill, color, shape)] * count


def _plural(shape: str) -> str:
    return shape + ("es" if shape.endswith("s") else "s")


@dataclass(frozen=True, kw_only=True)
class ParsedPairCaption:
    """The content of an image-to-image caption; `top` is None if the caption only says "scene"."""

    transform: Transform
    color: str | None = None
    top: ParsedCaption | None = None


def parse_pair(caption: str) -> ParsedPairCaption | None:
    """Parse an image-to-image caption of synthetic scenes; None for any other caption."""
    match = _PAIR.fullmatch(" ".join(caption.lower().strip(" .").split()))
    if match is None:
        return None
    subject, phrase = match.groups()
    top = None if subject == "scene" else parse(subject) or parse(f"a {subject}")
    if subject != "scene" and top is None:
        return None
    color = phrase.removeprefix("colored ")
    if phrase.startswith("colored ") and color in scenes.COLORS:
        return ParsedPairCaption(transform="recolored", color=color, top=top)
    return ParsedPairCaption(transform=_TRANSFORM_PHRASES[phrase], top=top) if phrase in _TRANSFORM_PHRASES else None
