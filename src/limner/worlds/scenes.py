"""A small synthetic world: scenes of one to four things, their pictures, their captions, their truth.

Why a world of our own: whether a drawing shows *what its caption says* is a question of fact here.
`scenes.py` turns a `Scene` into pixels and words, `oracle.py` turns pixels back into a `Scene`
without a learned model, and `Claims` says whether a scene keeps what a caption promised.

Layout. A scene lives on a lattice of `12 x 12` units. A small thing fills a box of 3 units, a large
one 5; boxes start on the lattice and never touch. The picture has `size / 12` pixels a unit, 48 x 48
by default, so that a dVAE with 4x downsampling spends one token on each unit.

Held-out split. What a thing is and lies on (size, fill, color, shape, background) is *held out* if it is
in one of forty classes of a Latin-square colouring of all 1,200 combinations: whatever four of the five
occur in training, and for every shape, size and fill all but one of the 40 pairs of a color and a
background. A scene is held out if any of its things is. (Where one in eight was, many a color, shape, fill
and background had a single size left, and a model learned that exception instead of the rule.)

Pairs. "The exact same scene on the top as a sketch at the bottom" (Ramesh et al. 2021, Figure 14):
two panels of `12 x 6` units, the lower one a `Transform` of the upper one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import permutations
from typing import Any, Literal

import numpy as np

Shape = Literal["circle", "square", "triangle", "diamond", "cross"]
Fill = Literal["solid", "striped", "outlined"]
Size = Literal["small", "large"]
Look = tuple[Size, Fill, str, Shape]  # str: the color
Split = Literal["train", "held-out"]
Relation = Literal["above", "below", "left of", "right of"]
Transform = Literal["sketch", "upside down", "recolored", "grayscale"]

SHAPES: tuple[Shape, ...] = ("circle", "square", "triangle", "diamond", "cross")
FILLS: tuple[Fill, ...] = ("solid", "striped", "outlined")
SIZES: tuple[Size, ...] = ("small", "large")
COLORS: dict[str, tuple[int, int, int]] = {
    "red": (214, 39, 40),
    "green": (34, 150, 60),
    "blue": (40, 80, 210),
    "yellow": (250, 220, 40),
    "orange": (250, 130, 20),
    "purple": (140, 50, 170),
    "black": (20, 20, 20),
    "white": (250, 250, 250),
}
BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "gray": (150, 150, 150),
    "beige": (225, 205, 165),
    "pink": (250, 165, 190),
    "brown": (115, 80, 50),
    "teal": (85, 190, 185),
}
PAPER = "white"  # the background of a sketch; scenes themselves never lie on it
TRANSFORMS: tuple[Transform, ...] = ("sketch", "upside down", "recolored", "grayscale")
UNITS = 12  # side of the lattice
EXTENT: dict[Size, int] = {"small": 3, "large": 5}  # side of a thing's box, in units
_HELD_OUT_EVERY = len(COLORS) * len(BACKGROUNDS)
_SAID = 0.95  # how often a caption says the sizes, and the background
_RELATION_MARGIN = UNITS / 8  # how far apart two centres must be for a relation to hold, in units
_OPPOSITE: dict[Relation, Relation] = {
    "above": "below", "below": "above", "left of": "right of", "right of": "left of",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Thing:
    """One object; `x`, `y` are the left and top of its box in lattice units."""

    shape: Shape
    color: str
    size: Size
    fill: Fill
    x: float
    y: float

    @property
    def center(self) -> tuple[float, float]:
        half = EXTENT[self.size] / 2
        return self.x + half, self.y + half

    @property
    def look(self) -> Look:
        return self.size, self.fill, self.color, self.shape


def held_out(look: Look, background: str) -> bool:
    """Whether such a thing on such a background belongs to the combinations kept out of training."""
    size, fill, color, shape = look
    pair = list(COLORS).index(color) + len(COLORS) * [*BACKGROUNDS, PAPER].index(background)
    rest = 20 * SIZES.index(size) + 13 * FILLS.index(fill) + 7 * SHAPES.index(shape)
    return (pair + rest) % _HELD_OUT_EVERY == 0


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Things on a background. `height` is 6 units for a panel of a pair."""

    things: tuple[Thing, ...]
    background: str
    width: int = UNITS
    height: int = UNITS

    @property
    def split(self) -> Split:
        return "held-out" if any(held_out(t.look, self.background) for t in self.things) else "train"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Scene:
        things = tuple(Thing(**thing) for thing in data["things"])
        return Scene(**{**data, "things": things})


@dataclass(frozen=True, kw_only=True)
class Pair:
    """An image-to-image example: `top` above its transform. `color` is the target of "recolored"."""

    top: Scene
    transform: Transform
    color: str | None = None

    @property
    def bottom(self) -> Scene | None:
        """What the lower panel shows, as a scene; None where no words of this world say it."""
        if self.transform == "sketch":
            lines = tuple(replace(t, color="black", fill="outlined") for t in self.top.things)
            return replace(self.top, things=lines, background=PAPER)
        if self.transform == "recolored":
            assert self.color is not None
            return replace(self.top, things=tuple(replace(t, color=self.color) for t in self.top.things))
        return None

    @property
    def split(self) -> Split:
        """Held out if either panel shows a held-out combination."""
        panels = (self.top, self.bottom)
        return "held-out" if any(p is not None and p.split == "held-out" for p in panels) else "train"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Pair:
        return Pair(**{**data, "top": Scene.from_dict(data["top"])})


# ---------------------------------------------------------------------------- sampling scenes


def sample_scene(
    rng: np.random.Generator,
    *,
    count: int | None = None,
    split: Split = "train",
    identical: float = 0.15,
    height: int = UNITS,
) -> Scene:
    """A random scene of `count` things (1 to 4 by default).

    Things of a held-out scene are free, but one at least has a held-out combination. With
    probability `identical` all things look alike ("three small red circles").
    """
    count = int(rng.integers(1, 5)) if count is None else count
    background = str(rng.choice(list(BACKGROUNDS)))
    while True:
        alike = count > 1 and rng.random() < identical
        looks = [_sample_look(rng) for _ in range(count)]
        if alike:
            looks = looks[:1] * count
        elif len(set(looks)) < count:
            continue  # identical things are said with a number, never by listing them
        things = _place(rng, looks, height)
        if len(things) < count:
            continue
        scene = Scene(things=tuple(things), background=background, height=height)
        if scene.split == split:
            return scene


def _sample_look(rng: np.random.Generator) -> Look:
    color = list(COLORS)[rng.integers(len(COLORS))]
    # Solid is what people mean when they say nothing, so it is half of the world.
    fill = FILLS[(0, 0, 1, 2)[rng.integers(4)]]
    return SIZES[rng.integers(2)], fill, color, SHAPES[rng.integers(len(SHAPES))]


def sample_crowd(rng: np.random.Generator, *, count: int = 12, split: Split = "train") -> Scene:
    """A training scene that is full: up to `count` things, as many as fit. No caption says it; it is
    what a dVAE learns things from, of which a described scene shows but a few. All fills are as
    frequent, since the thin lines of outlines and stripes are what is hard to reconstruct."""
    background = str(rng.choice(list(BACKGROUNDS)))
    while True:
        looks: list[Look] = []
        for _ in range(count):
            size, _, color, shape = _sample_look(rng)
            looks.append((size, FILLS[rng.integers(3)], color, shape))
        if split == "train":
            looks = [look for look in looks if not held_out(look, background)]
        scene = Scene(things=tuple(_place(rng, looks, UNITS)), background=background)
        if scene.split == split:
            return scene


def _place(rng: np.random.Generator, looks: Sequence[Look], height: int) -> list[Thing]:
    """Boxes on the lattice with at least one unit between them, for those looks that fit."""
    placed: list[Thing] = []
    for size, fill, color, shape in looks:
        side = EXTENT[size]
        for _ in range(20):
            x, y = int(rng.integers(UNITS - side + 1)), int(rng.integers(height - side + 1))
            if all(
                x >= t.x + EXTENT[t.size] + 1
                or t.x >= x + side + 1
                or y >= t.y + EXTENT[t.size] + 1
                or t.y >= y + side + 1
                for t in placed
            ):
                placed.append(Thing(shape=shape, color=color, size=size, fill=fill, x=x, y=y))
                break
    return placed


def sample_pair(rng: np.random.Generator, *, split: Split = "train") -> Pair:
    """A random top panel of one or two things, and what the lower panel makes of it."""
    while True:
        top = sample_scene(rng, count=int(rng.integers(1, 3)), split=split, height=UNITS // 2)
        transform = TRANSFORMS[rng.integers(len(TRANSFORMS))]
        color = str(rng.choice(list(COLORS))) if transform == "recolored" else None
        pair = Pair(top=top, transform=transform, color=color)
        if pair.split == split:
            return pair


# ---------------------------------------------------------------------------- pictures


@lru_cache(maxsize=256)
def stencil(shape: Shape, size: Size, fill: Fill, unit: int) -> np.ndarray:
    """Opacity of a thing on its box, float32 [side, side] in [0, 1]; anti-aliased 8 x 8."""
    side, over = EXTENT[size] * unit, 8
    # Coordinates in [-1, 1] across the box, +y down.
    axis = (np.arange(side * over) + 0.5) / (side * over) * 2 - 1
    x, y = np.meshgrid(axis, axis)
    border = unit / side  # half a unit of outline, as a fraction of the half-width
    mask = _inside(shape, x, y, 0.0)
    if fill == "outlined":
        mask &= ~_inside(shape, x, y, border)
    elif fill == "striped":
        mask &= np.floor(np.arange(side * over) / over / unit * 2).astype(int)[:, None] % 2 == 0
    return mask.reshape(side, over, side, over).mean((1, 3), dtype=np.float32)


def _inside(shape: Shape, x: np.ndarray, y: np.ndarray, inset: float) -> np.ndarray:
    """The shape inscribed in [-1, 1]^2, with its border moved inwards by `inset`."""
    if shape == "circle":
        return x**2 + y**2 <= (1 - inset) ** 2
    if shape == "square":
        return np.maximum(abs(x), abs(y)) <= 0.92 - inset
    if shape == "diamond":
        return abs(x) + abs(y) <= 1 - inset * 2**0.5
    if shape == "triangle":  # apex up: |x| <= (y + 1) / 2
        return (y <= 1 - inset) & (abs(x) <= (y + 1) / 2 - inset * 5**0.5 / 2)
    arm = 0.4
    bars = (abs(x) <= arm - inset) & (abs(y) <= 1 - inset)
    return bars | ((abs(y) <= arm - inset) & (abs(x) <= 1 - inset))


def render(scene: Scene, size: int = 48) -> np.ndarray:
    """The picture, uint8 [H, W, 3]; `size` is the width in pixels, a multiple of 12."""
    unit, rest = divmod(size, scene.width)
    if rest:
        raise ValueError(f"size {size} is not a multiple of {scene.width}")
    paint = BACKGROUNDS.get(scene.background) or COLORS[scene.background]
    picture = np.empty((scene.height * unit, size, 3), np.float32)
    picture[:] = paint
    for thing in scene.things:
        alpha = stencil(thing.shape, thing.size, thing.fill, unit)[..., None]
        top, left = round(thing.y * unit), round(thing.x * unit)
        box = picture[top : top + len(alpha), left : left + len(alpha)]
        box += alpha * (np.asarray(COLORS[thing.color], np.float32) - box)
    return np.rint(picture).astype(np.uint8)


def render_pair(pair: Pair, size: int = 48) -> np.ndarray:
    """Both panels, uint8 [size, size, 3]."""
    top = render(pair.top, size)
    return np.concatenate([top, transform_panel(pair, top, size)])


def transform_panel(pair: Pair, top: np.ndarray, size: int) -> np.ndarray:
    """What the lower panel shows, given the pixels `top` of the upper one."""
    if pair.transform == "upside down":
        return top[::-1]
    if pair.transform == "grayscale":
        luma = np.rint(top @ np.array([0.299, 0.587, 0.114], np.float32)).astype(np.uint8)
        return np.repeat(luma[..., None], 3, -1)
    assert pair.bottom is not None
    return render(pair.bottom, size)


# ---------------------------------------------------------------------------- words

_NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4}


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
    """One of the ways to say a scene. Now and then it leaves out the sizes or the background.

    Of two things that are above, below, left or right of each other, either is said first; but with
    probability `in_order`, always the upper or left one.
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
    """The things, and how two of them stand, in any order."""
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
    """The image-to-image captions of Figure 14, for this world. Some call what they show a "scene"."""
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
    """Every relation that clearly holds of a to b: their boxes are apart along that axis."""
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
    """What a caption says: partial looks (size, fill, color, shape; None = unsaid) and the rest."""

    looks: tuple[tuple[str | None, str, str, str], ...]
    relation: Relation | None = None  # of the first thing to the second
    background: str | None = None

    def hold(self, scene: Scene) -> bool:
        """Whether everything said is so: number, looks, relation, background."""
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
    """Read a caption of this world; None if it says something the world has no words for."""
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
