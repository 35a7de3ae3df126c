"""Synthetic scenes of one to four objects on a background, single or in pairs.

A program can check whether a picture of a scene matches its caption.
This module defines scenes and samples them. `rendering.py` renders a `Scene`. `captions.py` describes it in words and
parses words into a `ParsedCaption`. `scene_reader.py` parses pixels into a `Scene` without a learned model, and
`verify.py` checks a picture against a caption.

Layout. A scene is a lattice of `12 x 12` units. A small object fills a box of 3 x 3 units, a large one 5 x 5. Boxes
start on lattice points and never touch. A picture has `size / 12` pixels per unit, 48 x 48 pixels by default, so that
a dVAE with 4x downsampling spends one token on each unit.

Held-out split. A Latin square divides all 1,200 combinations of size, fill, color, shape and background into forty
classes, and one class is *held out*. So any four of the five attributes occur together in training, and for every
shape, size and fill all but one of the 40 pairs of a color and a background. A scene is held out if any of its
objects is. (Holding out one in eight left many combinations of color, shape, fill and background with a single size,
and a model learned that exception instead of the rule.)

Pairs. "The exact same scene on the top as a sketch at the bottom" (Ramesh et al. 2021, Figure 14):
two panels of `12 x 6` units, the lower one a `Transform` of the upper one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

Shape = Literal["circle", "square", "triangle", "diamond", "cross"]
Fill = Literal["solid", "striped", "outlined"]
Size = Literal["small", "large"]
Attributes = tuple[Size, Fill, str, Shape]  # str: the color
Split = Literal["train", "held-out"]
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
SKETCH_BACKGROUND = "white"  # background of sketches only
TRANSFORMS: tuple[Transform, ...] = ("sketch", "upside down", "recolored", "grayscale")
UNITS = 12  # side of the lattice
EXTENT: dict[Size, int] = {"small": 3, "large": 5}  # side of an object's box, in units
_HELD_OUT_EVERY = len(COLORS) * len(BACKGROUNDS)


@dataclass(frozen=True, kw_only=True)
class SceneObject:
    """One object; `x`, `y` are the left and top of its box, in units."""

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
    def attributes(self) -> Attributes:
        return self.size, self.fill, self.color, self.shape


def held_out(attributes: Attributes, background: str) -> bool:
    """Return True if the combination of attributes and background is held out of training."""
    size, fill, color, shape = attributes
    paints = list(COLORS).index(color) + len(COLORS) * [*BACKGROUNDS, SKETCH_BACKGROUND].index(background)
    form = 20 * SIZES.index(size) + 13 * FILLS.index(fill) + 7 * SHAPES.index(shape)
    return (paints + form) % _HELD_OUT_EVERY == 0


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Objects on a background; `height` is 6 units for a panel of a pair."""

    objects: tuple[SceneObject, ...]
    background: str
    width: int = UNITS
    height: int = UNITS

    @property
    def split(self) -> Split:
        return "held-out" if any(held_out(t.attributes, self.background) for t in self.objects) else "train"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Scene:
        objects = tuple(SceneObject(**item) for item in data["objects"])
        return Scene(**{**data, "objects": objects})


@dataclass(frozen=True, kw_only=True)
class ScenePair:
    """An image-to-image example: `top` above its transform. `color` is the target of "recolored"."""

    top: Scene
    transform: Transform
    color: str | None = None

    @property
    def bottom(self) -> Scene | None:
        """The lower panel as a `Scene`; None for transforms that a `Scene` cannot express."""
        if self.transform == "sketch":
            lines = tuple(replace(t, color="black", fill="outlined") for t in self.top.objects)
            return replace(self.top, objects=lines, background=SKETCH_BACKGROUND)
        if self.transform == "recolored":
            assert self.color is not None
            return replace(self.top, objects=tuple(replace(t, color=self.color) for t in self.top.objects))
        return None

    @property
    def split(self) -> Split:
        """Return "held-out" if either panel shows a held-out combination, else "train"."""
        panels = (self.top, self.bottom)
        return "held-out" if any(p is not None and p.split == "held-out" for p in panels) else "train"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> ScenePair:
        return ScenePair(**{**data, "top": Scene.from_dict(data["top"])})


def sample_scene(
    rng: np.random.Generator,
    *,
    count: int | None = None,
    split: Split = "train",
    identical: float = 0.15,
    height: int = UNITS,
) -> Scene:
    """Sample a scene of `count` objects (1 to 4 by default).

    At least one object of a held-out scene has a held-out combination. With probability `identical` all
    objects have the same attributes ("three small red circles").
    """
    count = int(rng.integers(1, 5)) if count is None else count
    background = str(rng.choice(list(BACKGROUNDS)))
    while True:
        identical_objects = count > 1 and rng.random() < identical
        attributes = [_sample_attributes(rng) for _ in range(count)]
        if identical_objects:
            attributes = attributes[:1] * count
        elif len(set(attributes)) < count:
            continue  # captions count identical objects, never list them
        objects = _place(rng, attributes, height)
        if len(objects) < count:
            continue
        scene = Scene(objects=tuple(objects), background=background, height=height)
        if scene.split == split:
            return scene


def _sample_attributes(rng: np.random.Generator) -> Attributes:
    color = list(COLORS)[rng.integers(len(COLORS))]
    # Half of all objects are solid: people mean solid when they name no fill.
    fill = FILLS[(0, 0, 1, 2)[rng.integers(4)]]
    return SIZES[rng.integers(2)], fill, color, SHAPES[rng.integers(len(SHAPES))]


def sample_dense_scene(rng: np.random.Generator, *, split: Split = "train") -> Scene:
    """Sample a scene without a caption, of up to twelve objects, as many as fit.

    It trains a dVAE: a described scene shows few objects. All fills are equally frequent, since the
    thin lines of outlines and stripes are hard to reconstruct."""
    background = str(rng.choice(list(BACKGROUNDS)))
    while True:
        attributes: list[Attributes] = []
        for _ in range(12):
            size, _, color, shape = _sample_attributes(rng)
            attributes.append((size, FILLS[rng.integers(3)], color, shape))
        if split == "train":
            attributes = [item for item in attributes if not held_out(item, background)]
        scene = Scene(objects=tuple(_place(rng, attributes, UNITS)), background=background)
        if scene.split == split:
            return scene


def _place(rng: np.random.Generator, attributes: Sequence[Attributes], height: int) -> list[SceneObject]:
    """Place objects with these attributes, as many as fit, in boxes on the lattice, at least one unit apart."""
    placed: list[SceneObject] = []
    for size, fill, color, shape in attributes:
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
                placed.append(SceneObject(shape=shape, color=color, size=size, fill=fill, x=x, y=y))
                break
    return placed


def sample_pair(rng: np.random.Generator, *, split: Split = "train") -> ScenePair:
    """Sample a top panel of one or two objects, and a transform for the lower panel."""
    while True:
        top = sample_scene(rng, count=int(rng.integers(1, 3)), split=split, height=UNITS // 2)
        transform = TRANSFORMS[rng.integers(len(TRANSFORMS))]
        color = str(rng.choice(list(COLORS))) if transform == "recolored" else None
        pair = ScenePair(top=top, transform=transform, color=color)
        if pair.split == split:
            return pair
