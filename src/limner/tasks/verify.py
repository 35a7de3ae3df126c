"""Checks of a picture against a caption, or a pair, of synthetic scenes."""

from __future__ import annotations

import numpy as np

from limner.errors import UserError
from limner.tasks.captions import ParsedPairCaption, parse, parse_pair
from limner.tasks.pair_reader import is_gray_of, read_pair
from limner.tasks.scene_reader import read
from limner.tasks.scenes import Scene, ScenePair

__all__ = ["pair_holds", "satisfies", "scenes_match"]


def satisfies(picture: np.ndarray, caption: str) -> bool:
    """Return True if the picture, uint8 [H, H, 3], matches the caption in full.

    Raises `UserError` if the caption cannot be parsed.
    """
    if (claims := parse(caption)) is not None:
        scene = read(picture).scene
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
