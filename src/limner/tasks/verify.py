"""Checks of a picture, or of another caption, against a caption or a pair of synthetic scenes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from limner.data.hard_negative_captions import FalsityTest
from limner.errors import UserError
from limner.tasks import scene_reader, scenes
from limner.tasks.captions import ParsedCaption, ParsedPairCaption, parse, parse_pair
from limner.tasks.rendering import alpha_mask, render, render_pair, transform_panel
from limner.tasks.scene_reader import SceneReading, block
from limner.tasks.scenes import UNITS, Scene, ScenePair, Transform, held_out

__all__ = ["falsity_test", "is_gray_of", "pair_holds", "read_pair", "satisfies", "scenes_match"]

_COMPARED_PIXELS = 2 * UNITS  # side of compared pictures: enough to distinguish any two scenes on the lattice


def satisfies(picture: np.ndarray, caption: str) -> bool:
    """Return True if the picture, uint8 [H, H, 3], matches the caption in full.

    Raises `UserError` if the caption cannot be parsed.
    """
    if (claims := parse(caption)) is not None:
        scene = scene_reader.read(picture).scene
        return scene is not None and claims.matches(scene)
    if (pair := parse_pair(caption)) is not None:
        return pair_holds(pair, picture)
    raise UserError(
        f"the caption {caption!r} cannot be parsed: use the words of the synthetic scenes, "
        'such as "a small red circle above a large blue square on a gray background"'
    )


def pair_holds(expected: ScenePair | ParsedPairCaption, picture: np.ndarray) -> bool:
    """Return True if the top of uint8 [H, H, 3] matches `expected` and the bottom is its transform.

    A `ScenePair` also fixes the positions of objects in its top panel.
    """
    top, bottom = (reading.scene for reading in read_pair(picture, expected.transform))
    if top is None or not top.objects:
        return False
    if isinstance(expected, ScenePair):
        if not scenes_match(top, expected.top):
            return False
    elif expected.top is not None and not expected.top.matches(top):
        return False
    if expected.transform == "grayscale":
        return is_gray_of(picture, top)
    if bottom is None:
        return False
    pair = ScenePair(top=top, transform=expected.transform, color=expected.color)
    return scenes_match(bottom, pair.bottom or top)  # "upside down" was turned back


def scenes_match(a: Scene, b: Scene, tolerance: float = 0.5) -> bool:
    """Return True if two scenes are equal, with positions within `tolerance` units."""
    if a.background != b.background or len(a.objects) != len(b.objects):
        return False
    unmatched = list(b.objects)
    for s in a.objects:
        near = [t for t in unmatched if max(abs(t.x - s.x), abs(t.y - s.y)) <= tolerance]
        same = [t for t in near if t.attributes == s.attributes]
        if not same:
            return False
        unmatched.remove(same[0])  # only one, since boxes do not overlap
    return True


def read_pair(picture: np.ndarray, transform: Transform | None) -> tuple[SceneReading, SceneReading]:
    """Parse the two panels, top and bottom, of uint8 [H, H, 3].

    For "upside down", the bottom is flipped back first. Paints of "grayscale" panels are outside the
    palette, so their reading is unreliable: `is_gray_of` compares pixels instead.
    """
    top, bottom = np.split(scene_reader.as_pixels(picture)[0], 2)
    upright = bottom[::-1] if transform == "upside down" else bottom
    backgrounds = *scenes.BACKGROUNDS, scenes.SKETCH_BACKGROUND
    return scene_reader.read(top), scene_reader.read(upright, backgrounds=backgrounds)


def is_gray_of(picture: np.ndarray, top: Scene) -> bool:
    """Return True if the bottom panel of uint8 [H, H, 3] is the luma of the top panel, parsed as `top`.

    It compares pixels: an object may nearly vanish in gray (orange on gray), where no template would find it.
    """
    pixels, unit = scene_reader.as_pixels(picture)
    upper, lower = np.split(pixels, 2)
    pair = ScenePair(top=top, transform="grayscale")
    residual = lower - transform_panel(pair, upper, UNITS * unit)
    cast = np.median(residual, (0, 1))
    if np.linalg.norm(cast) > scene_reader.MIN_UNEXPLAINED_LEVELS:
        return False
    residual -= cast
    noise = scene_reader.noise_energy(abs(residual))
    residual = residual.transpose(2, 0, 1)
    if scene_reader.is_unexplained(residual, noise, unit):
        return False
    errors = scene_reader.pixel_errors(residual, noise)
    expected = transform_panel(pair, render(top, UNITS * unit), UNITS * unit)
    for item in top.objects:
        box = scene_reader.outer_box(item, unit)
        contrast = max(3**0.5 * float(np.ptp(block(expected[..., 0], *box))), scene_reader.MIN_UNEXPLAINED_LEVELS)
        area = alpha_mask(item.shape, item.size, item.fill, unit).sum()
        if scene_reader.wrong_pixels(block(errors, *box) / contrast) > scene_reader.MAX_WRONG_SHARE * area:
            return False
    return True


def falsity_test(meta: Mapping[str, Any]) -> FalsityTest | None:
    """Return the test whether a caption may serve as a wrong caption of a sample; None for other data.

    The metadata of synthetic samples holds their contents ("scene" or "pair"). The caption must parse, be false, and
    name no held-out combination: a model must not learn that held-out combinations are wrong. A held-out sample is
    never trained on, so any false caption serves.
    """
    for key, kind, test in (("scene", Scene, _is_false_of_scene), ("pair", ScenePair, _is_false_of_pair)):
        # Other data may use the same key for something else.
        with suppress(AssertionError, AttributeError, KeyError, TypeError, ValueError):
            truth = kind.from_dict(meta[key])
            if _is_synthetic(truth):
                return partial(test, truth)
    return None


def _is_synthetic(truth: Scene | ScenePair) -> bool:
    """Return True for a synthetic scene or pair; may raise for other values."""
    scene = truth.top if isinstance(truth, ScenePair) else truth
    is_known = (
        scene.background in scenes.BACKGROUNDS
        and (scene.width, scene.height) in ((UNITS, UNITS), (UNITS, UNITS // 2))
        and len(scene.objects) <= UNITS**2
        and all(t.shape in scenes.SHAPES and t.fill in scenes.FILLS for t in scene.objects)
        and all(t.size in scenes.SIZES and t.color in scenes.COLORS for t in scene.objects)
        and all(0 <= t.x <= scene.width - scenes.EXTENT[t.size] for t in scene.objects)
        and all(0 <= t.y <= scene.height - scenes.EXTENT[t.size] for t in scene.objects)
    )
    if isinstance(truth, ScenePair):
        colored = truth.transform != "recolored" or truth.color in scenes.COLORS
        is_known &= truth.transform in scenes.TRANSFORMS and colored
    return is_known


def _is_false_of_scene(scene: Scene, caption: str) -> bool:
    claims = parse(caption)
    if claims is None or claims.matches(scene):
        return False
    return scene.split == "held-out" or not _names_held_out(claims)


def _is_false_of_pair(pair: ScenePair, caption: str) -> bool:
    claims = parse_pair(caption)
    if claims is None:
        return False
    described = ScenePair(top=pair.top, transform=claims.transform, color=claims.color)
    if pair.split != "held-out" and (
        described.split == "held-out" if claims.top is None else _names_held_out(claims.top, claims)
    ):
        return False
    if claims.top is not None and not claims.top.matches(pair.top):
        return True
    # Different captions can render the same picture: a red circle colored red is a red circle.
    return not np.array_equal(render_pair(described, _COMPARED_PIXELS), render_pair(pair, _COMPARED_PIXELS))


def _names_held_out(claims: ParsedCaption, pair: ParsedPairCaption | None = None) -> bool:
    """Return True if the claims name all of a held-out combination, or if a panel below, made by the transform of
    `pair`, shows one."""
    panels = [(claims.attributes, claims.background)]
    if pair and pair.transform == "sketch":
        lines = tuple((size, "outlined", "black", shape) for size, _, _, shape in claims.attributes)
        panels.append((lines, scenes.SKETCH_BACKGROUND))
    elif pair and pair.color:
        colored = tuple((size, fill, pair.color, shape) for size, fill, _, shape in claims.attributes)
        panels.append((colored, claims.background))
    return any(
        size is not None and background is not None and held_out((size, fill, color, shape), background)  # pyright: ignore[reportArgumentType]
        for attributes, background in panels
        for size, fill, color, shape in attributes
    )
