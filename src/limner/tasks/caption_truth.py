"""Tests that a caption is false of a picture with known contents.

The metadata of synthetic samples holds their contents ("scene" or "pair"). `falsity_test(meta)` tests whether a
caption may serve as a wrong caption of such a sample in training. It must parse, be false, and name no
held-out combination: a model must not learn that held-out combinations are wrong. A held-out sample is never trained
on, so any false caption serves.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from limner.data.hard_negative_captions import FalsityTest
from limner.tasks.captions import ParsedCaption, ParsedPairCaption, parse, parse_pair
from limner.tasks.rendering import render, render_pair
from limner.tasks.scenes import (
    BACKGROUNDS,
    COLORS,
    FILLS,
    SHAPES,
    SIZES,
    SKETCH_BACKGROUND,
    TRANSFORMS,
    UNITS,
    Scene,
    ScenePair,
    held_out,
)

_COMPARED_PIXELS = 2 * UNITS  # side of compared pictures: enough to distinguish any two scenes on the lattice


def falsity_test(meta: Mapping[str, Any]) -> FalsityTest | None:
    """Return the caption test of one sample; None if its metadata describes no synthetic scene."""
    try:
        if "scene" in meta and _is_synthetic(scene := Scene.from_dict(meta["scene"])):
            return partial(_is_false_of_scene, scene)
        pair = ScenePair.from_dict(meta["pair"])
        if _is_synthetic(pair.top) and pair.transform in TRANSFORMS:
            render_pair(pair, _COMPARED_PIXELS)
            return partial(_is_false_of_pair, pair)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError):
        pass  # other data may use the same key for something else
    return None


def _is_synthetic(scene: Scene) -> bool:
    """Return True for a synthetic scene; may raise for other values."""
    is_known = (
        scene.background in BACKGROUNDS
        and (scene.width, scene.height) in ((UNITS, UNITS), (UNITS, UNITS // 2))
        and len(scene.objects) <= UNITS**2
        and all(t.shape in SHAPES and t.fill in FILLS and t.size in SIZES and t.color in COLORS for t in scene.objects)
        and all(0 <= t.x <= UNITS and 0 <= t.y <= UNITS for t in scene.objects)
    )
    return is_known and render(scene, _COMPARED_PIXELS).ndim == 3


def _is_false_of_scene(scene: Scene, caption: str) -> bool:
    claims = parse(caption)
    if claims is None or claims.matches(scene):
        return False
    return scene.split == "held-out" or not _names_held_out(claims, claims.background)


def _is_false_of_pair(pair: ScenePair, caption: str) -> bool:
    claims = parse_pair(caption)
    if claims is None:
        return False
    described = ScenePair(top=pair.top, transform=claims.transform, color=claims.color)
    if pair.split != "held-out" and _pair_names_held_out(claims, described):
        return False
    if claims.top is not None and not claims.top.matches(pair.top):
        return True
    # Different captions can render the same picture: a red circle colored red is a red circle.
    return not np.array_equal(render_pair(described, _COMPARED_PIXELS), render_pair(pair, _COMPARED_PIXELS))


def _pair_names_held_out(claims: ParsedPairCaption, described: ScenePair) -> bool:
    """Return True if either panel is held out; `described` stands in for a caption that only says "scene"."""
    top = claims.top
    if top is None:
        return described.split == "held-out"
    if claims.transform == "sketch":
        below = _names_held_out(_recolor(top, fill="outlined", color="black"), SKETCH_BACKGROUND)
    else:
        below = claims.color is not None and _names_held_out(_recolor(top, color=claims.color), top.background)
    return below or _names_held_out(top, top.background)


def _recolor(claims: ParsedCaption, *, color: str, fill: str | None = None) -> ParsedCaption:
    """Return the claims with color, and fill if given, replaced for all objects."""
    attributes = ((size, fill or named, color, shape) for size, named, _, shape in claims.attributes)
    return ParsedCaption(attributes=tuple(attributes))


def _names_held_out(claims: ParsedCaption, background: str | None) -> bool:
    """Return True if a combination with all attributes given is held out."""
    return background is not None and any(
        size is not None and held_out((size, fill, color, shape), background)  # pyright: ignore[reportArgumentType]
        for size, fill, color, shape in claims.attributes
    )
