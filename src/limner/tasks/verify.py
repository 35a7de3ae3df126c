"""Checks of a picture against a caption, or a pair, of synthetic scenes."""

from __future__ import annotations

import numpy as np

from limner.errors import UserError
from limner.tasks.captions import PairClaims, parse, parse_pair
from limner.tasks.pair_reader import is_gray_of, read_pair
from limner.tasks.scene_reader import read
from limner.tasks.scenes import Pair, Scene


def satisfies(picture: np.ndarray, caption: str) -> bool:
    """Return True if the picture, uint8 [H, H, 3], matches the caption in full.

    Raises `UserError` if the caption cannot be parsed.
    """
    if (claims := parse(caption)) is not None:
        scene = read(picture).scene
        return scene is not None and claims.hold(scene)
    if (pair := parse_pair(caption)) is not None:
        return pair_holds(pair, picture)
    raise UserError(
        f"the oracle cannot read the caption {caption!r}: say it in the words of the scenes, "
        'such as "a small red circle above a large blue square on a gray background"'
    )


def pair_holds(said: Pair | PairClaims, picture: np.ndarray) -> bool:
    """Return True if the top of uint8 [H, H, 3] matches `said` and the bottom is its transform.

    A `Pair` also fixes the positions of objects in its top panel.
    """
    top, bottom = (reading.scene for reading in read_pair(picture, said.transform))
    if top is None or not top.things:
        return False
    if isinstance(said, Pair):
        if not alike(top, said.top):
            return False
    elif said.top is not None and not said.top.hold(top):
        return False
    if said.transform == "grayscale":
        return is_gray_of(picture, top)
    if bottom is None:
        return False
    seen = Pair(top=top, transform=said.transform, color=said.color)
    expected = seen.bottom or top  # "upside down" was turned back
    return alike(bottom, expected)


def alike(a: Scene, b: Scene, tolerance: float = 0.5) -> bool:
    """Return True if two scenes are equal, with positions within `tolerance` units."""
    if a.background != b.background or len(a.things) != len(b.things):
        return False
    rest = list(b.things)
    for s in a.things:
        twins = [t for t in rest if t.look == s.look and max(abs(t.x - s.x), abs(t.y - s.y)) <= tolerance]
        if not twins:
            return False
        rest.remove(twins[0])  # only one, since boxes do not overlap
    return True
