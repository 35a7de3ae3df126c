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

from limner.tasks.scenes import (
    BACKGROUNDS,
    COLORS,
    EXTENT,
    FILLS,
    SHAPES,
    SIZES,
    UNITS,
    Scene,
    SceneObject,
    ScenePair,
    Transform,
)

Relation = Literal["above", "below", "left of", "right of"]

_NAMED = 0.95  # probability that a caption names sizes, and background
_RELATION_MARGIN = UNITS / 8  # least distance of two centers for a relation to hold, in units
_OPPOSITE: dict[Relation, Relation] = {
    "above": "below", "below": "above", "left of": "right of", "right of": "left of",
}  # fmt: skip
_NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4}
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
        number = next(word for word, n in _NUMBERS.items() if n == count)
        plural = "crosses" if shape == "cross" else shape + "s"
        return " ".join([number, *words[:-1], plural])
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
    phrase = {
        "sketch": "as a sketch at the bottom",
        "upside down": "upside down at the bottom",
        "grayscale": "in grayscale at the bottom",
        "recolored": f"colored {pair.color} at the bottom",
    }[pair.transform]
    return f"the exact same {subject} on the top {phrase}"


def spatial_relations(a: SceneObject, b: SceneObject) -> list[Relation]:
    """Return the relations of a to b; one holds if the boxes do not overlap along its axis."""
    relations: list[Relation] = []
    if a.y + EXTENT[a.size] <= b.y:
        relations.append("above")
    if b.y + EXTENT[b.size] <= a.y:
        relations.append("below")
    if a.x + EXTENT[a.size] <= b.x:
        relations.append("left of")
    if b.x + EXTENT[b.size] <= a.x:
        relations.append("right of")
    return relations


@dataclass(frozen=True, kw_only=True)
class ParsedCaption:
    """The content of a caption. `attributes` are (size, fill, color, shape) of each object; an unnamed size is None."""

    attributes: tuple[tuple[str | None, str, str, str], ...]
    relation: Relation | None = None  # of the first object to the second
    background: str | None = None

    def matches(self, scene: Scene) -> bool:
        """Return True if number, attributes, relation and background all match the scene."""
        if self.background not in (None, scene.background):
            return False
        if len(scene.objects) != len(self.attributes):
            return False
        return any(self._fits(order) for order in permutations(scene.objects))

    def _fits(self, objects: Sequence[SceneObject]) -> bool:
        for named, item in zip(self.attributes, objects, strict=True):
            if any(word not in (None, value) for word, value in zip(named, item.attributes, strict=True)):
                return False
        return self.relation is None or _relation_holds(self.relation, objects[0], objects[1])


def _relation_holds(relation: Relation, a: SceneObject, b: SceneObject) -> bool:
    (ax, ay), (bx, by) = a.center, b.center
    gap = {"above": by - ay, "below": ay - by, "left of": bx - ax, "right of": ax - bx}[relation]
    return gap >= _RELATION_MARGIN


def parse(caption: str) -> ParsedCaption | None:
    """Parse a caption of a synthetic scene; None for any other caption."""
    text = " ".join(caption.lower().replace(",", " , ").replace(".", " ").split())
    background = None
    for name in BACKGROUNDS:
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
    for part in (p.strip(" ,") for p in parts):
        if part and not _parse_noun(part, attributes):
            return None
    if not 1 <= len(attributes) <= 4 or (relation and (len(parts) != 2 or len(attributes) != 2)):
        return None
    return ParsedCaption(attributes=tuple(attributes), relation=relation, background=background)


def _parse_noun(part: str, attributes: list[tuple[str | None, str, str, str]]) -> bool:
    words = part.removeprefix("there is ").removeprefix("there are ").split()
    count = _NUMBERS.get(words[0], 1 if words[0] in ("a", "an") else 0)
    if not count or len(words) < 3:
        return False
    plural = words[-1]
    singular = plural.removesuffix("es") if plural == "crosses" else plural.removesuffix("s")
    shape = plural if plural in SHAPES else singular
    adjectives = words[1:-1]
    size = next((w for w in adjectives if w in SIZES), None)
    fill = next((w for w in adjectives if w in FILLS), "solid")
    color = next((w for w in adjectives if w in COLORS), None)
    known = {size, color, fill}
    if shape not in SHAPES or color is None or any(w not in known for w in adjectives):
        return False
    attributes += [(size, fill, color, shape)] * count
    return True


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
    if phrase.startswith("colored ") and color in COLORS:
        return ParsedPairCaption(transform="recolored", color=color, top=top)
    return ParsedPairCaption(transform=_TRANSFORM_PHRASES[phrase], top=top) if phrase in _TRANSFORM_PHRASES else None
