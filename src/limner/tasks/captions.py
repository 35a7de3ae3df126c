"""Captions of synthetic scenes: describe scenes in words, and parse captions.

`describe` samples one of many captions of a scene. `parse` turns a caption into `Claims`, which hold of a scene or not.
`describe_pair` and `parse_pair` do the same for image-to-image captions.
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
    Pair,
    Scene,
    Thing,
    Transform,
)

Relation = Literal["above", "below", "left of", "right of"]

_SAID = 0.95  # probability that a caption names sizes, and background
_RELATION_MARGIN = UNITS / 8  # least distance of two centers for a relation to hold, in units
_OPPOSITE: dict[Relation, Relation] = {
    "above": "below", "below": "above", "left of": "right of", "right of": "left of",
}  # fmt: skip
_NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4}
_PAIR = re.compile(r"the exact same (.+) on the top (.+) at the bottom")
_HOW: dict[str, Transform] = {
    "as a sketch": "sketch",
    "upside down": "upside down",
    "in grayscale": "grayscale",
}


def _noun(look: tuple[str, ...], rng: np.random.Generator, sized: bool, count: int = 1) -> str:
    size, fill, color, shape = look
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
    if rng.random() >= _SAID:
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
    sized = rng.random() < _SAID
    things = [scene.things[i] for i in rng.permutation(len(scene.things))]
    looks = [t.look for t in things]
    if len(set(looks)) == 1:
        return _noun(looks[0], rng, sized, len(looks))
    nouns = [_noun(look, rng, sized) for look in looks]
    if len(things) == 2 and (relations := relations_of(things[0], things[1])):
        link: Relation = relations[rng.integers(len(relations))]
        if in_order and link in ("below", "right of") and rng.random() < in_order:
            nouns, link = nouns[::-1], _OPPOSITE[link]
        said = f"to the {link}" if link in ("left of", "right of") and rng.random() < 0.7 else link
        return f"{nouns[0]} {said} {nouns[1]}"
    return f"{', '.join(nouns[:-1])} and {nouns[-1]}"


def describe_pair(pair: Pair, rng: np.random.Generator) -> str:
    """Sample an image-to-image caption (Figure 14). Some say "scene" and do not describe it."""
    what = "scene"
    if rng.random() < _SAID:
        what = f"{_body(pair.top, rng)} on a {pair.top.background} background"
        what = what.removeprefix("an ").removeprefix("a ")
    how = {
        "sketch": "as a sketch at the bottom",
        "upside down": "upside down at the bottom",
        "grayscale": "in grayscale at the bottom",
        "recolored": f"colored {pair.color} at the bottom",
    }[pair.transform]
    return f"the exact same {what} on the top {how}"


def relations_of(a: Thing, b: Thing) -> list[Relation]:
    """Return the relations of a to b; one holds if the boxes do not overlap along its axis."""
    found: list[Relation] = []
    if a.y + EXTENT[a.size] <= b.y:
        found.append("above")
    if b.y + EXTENT[b.size] <= a.y:
        found.append("below")
    if a.x + EXTENT[a.size] <= b.x:
        found.append("left of")
    if b.x + EXTENT[b.size] <= a.x:
        found.append("right of")
    return found


@dataclass(frozen=True, kw_only=True)
class Claims:
    """The content of a caption. `looks` are (size, fill, color, shape); None is left open."""

    looks: tuple[tuple[str | None, str, str, str], ...]
    relation: Relation | None = None  # of the first object to the second
    background: str | None = None

    def hold(self, scene: Scene) -> bool:
        """Return True if number, looks, relation and background all match the scene."""
        if self.background not in (None, scene.background):
            return False
        if len(scene.things) != len(self.looks):
            return False
        return any(self._fits(order) for order in permutations(scene.things))

    def _fits(self, things: Sequence[Thing]) -> bool:
        for look, thing in zip(self.looks, things, strict=True):
            if any(said not in (None, seen) for said, seen in zip(look, thing.look, strict=True)):
                return False
        return self.relation is None or _relation_holds(self.relation, things[0], things[1])


def _relation_holds(relation: Relation, a: Thing, b: Thing) -> bool:
    (ax, ay), (bx, by) = a.center, b.center
    gap = {"above": by - ay, "below": ay - by, "left of": bx - ax, "right of": ax - bx}[relation]
    return gap >= _RELATION_MARGIN


def parse(caption: str) -> Claims | None:
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
    looks: list[tuple[str | None, str, str, str]] = []
    for part in (p.strip(" ,") for p in parts):
        if part and not _parse_noun(part, looks):
            return None
    if not 1 <= len(looks) <= 4 or (relation and (len(parts) != 2 or len(looks) != 2)):
        return None
    return Claims(looks=tuple(looks), relation=relation, background=background)


def _parse_noun(part: str, looks: list[tuple[str | None, str, str, str]]) -> bool:
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
    looks += [(size, fill, color, shape)] * count
    return True


@dataclass(frozen=True, kw_only=True)
class PairClaims:
    """The content of an image-to-image caption; `top` may be None: it only says "scene"."""

    transform: Transform
    color: str | None = None
    top: Claims | None = None


def parse_pair(caption: str) -> PairClaims | None:
    """Parse an image-to-image caption of synthetic scenes; None for any other caption."""
    match = _PAIR.fullmatch(" ".join(caption.lower().strip(" .").split()))
    if match is None:
        return None
    what, how = match.groups()
    top = None if what == "scene" else parse(what) or parse(f"a {what}")
    if what != "scene" and top is None:
        return None
    color = how.removeprefix("colored ")
    if how.startswith("colored ") and color in COLORS:
        return PairClaims(transform="recolored", color=color, top=top)
    return PairClaims(transform=_HOW[how], top=top) if how in _HOW else None
