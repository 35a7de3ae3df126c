"""Tests that a caption is false of a picture with known contents.

The metadata of synthetic samples holds their contents ("scene" or "pair"). `falsehood(meta)` tests whether a
caption may serve as a wrong caption of such a sample in training. It must parse, be false, and name no
held-out combination: a model must not learn that held-out combinations are wrong. A held-out sample is never trained
on, so any false caption serves.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from limner.data.hard_negative_captions import Falsehood
from limner.tasks.captions import Claims, PairClaims, parse, parse_pair
from limner.tasks.rendering import render, render_pair
from limner.tasks.scenes import (
    BACKGROUNDS,
    COLORS,
    FILLS,
    PAPER,
    SHAPES,
    SIZES,
    TRANSFORMS,
    UNITS,
    Pair,
    Scene,
    held_out,
)

_PIXELS = 2 * UNITS  # side of compared pictures: enough to distinguish any two scenes on the lattice


def falsehood(meta: Mapping[str, Any]) -> Falsehood | None:
    """Return the caption test of one sample; None if its metadata describes no synthetic scene."""
    try:
        if "scene" in meta and _is_ours(scene := Scene.from_dict(meta["scene"])):
            return partial(_false_of_scene, scene)
        if "pair" in meta and _is_ours((pair := Pair.from_dict(meta["pair"])).top) and pair.transform in TRANSFORMS:
            render_pair(pair, _PIXELS)
            return partial(_false_of_pair, pair)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError):
        pass  # other data may use the same key for something else
    return None


def _is_ours(scene: Scene) -> bool:
    """Return True for a synthetic scene; may raise for other values."""
    known = (
        scene.background in BACKGROUNDS
        and (scene.width, scene.height) in ((UNITS, UNITS), (UNITS, UNITS // 2))
        and len(scene.things) <= UNITS**2
        and all(t.shape in SHAPES and t.fill in FILLS and t.size in SIZES and t.color in COLORS for t in scene.things)
        and all(0 <= t.x <= UNITS and 0 <= t.y <= UNITS for t in scene.things)
    )
    return known and render(scene, _PIXELS).ndim == 3


def _false_of_scene(scene: Scene, caption: str) -> bool:
    claims = parse(caption)
    if claims is None or claims.hold(scene):
        return False
    return scene.split == "held-out" or not _says_held_out(claims, claims.background)


def _false_of_pair(pair: Pair, caption: str) -> bool:
    said = parse_pair(caption)
    if said is None:
        return False
    made = Pair(top=pair.top, transform=said.transform, color=said.color)
    if pair.split != "held-out" and _pair_says_held_out(said, made):
        return False
    if said.top is not None and not said.top.hold(pair.top):
        return True
    # Different captions can render the same picture: a red circle colored red is a red circle.
    return not np.array_equal(render_pair(made, _PIXELS), render_pair(pair, _PIXELS))


def _pair_says_held_out(said: PairClaims, made: Pair) -> bool:
    """Return True if either panel is held out; a caption that only says "scene" describes `made`."""
    top = said.top
    if top is None:
        return made.split == "held-out"
    if said.transform == "sketch":
        below = _says_held_out(_all(top, fill="outlined", color="black"), PAPER)
    else:
        below = said.color is not None and _says_held_out(_all(top, color=said.color), top.background)
    return below or _says_held_out(top, top.background)


def _all(claims: Claims, *, color: str, fill: str | None = None) -> Claims:
    """Return the claims with color, and fill if given, replaced for all objects."""
    return Claims(looks=tuple((size, fill or own, color, shape) for size, own, _, shape in claims.looks))


def _says_held_out(claims: Claims, background: str | None) -> bool:
    """Return True if a combination with all attributes given is held out."""
    return background is not None and any(
        size is not None and held_out((size, fill, color, shape), background)  # pyright: ignore[reportArgumentType]
        for size, fill, color, shape in claims.looks
    )
