"""Whether a picture keeps what a caption, or a pair, of the synthetic world says."""

from __future__ import annotations

import numpy as np

from limner.errors import UserError
from limner.tasks.captions import PairClaims, parse, parse_pair
from limner.tasks.pair_reader import is_gray_of, read_pair
from limner.tasks.scene_reader import read
from limner.tasks.scenes import Pair, Scene


def satisfies(picture: np.ndarray, caption: str) -> bool:
    """Whether uint8 [H, H, 3] keeps everything that a caption of this world says.

    Raises UserError if the world has no words for the caption.
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
    """Whether the top of uint8 [H, H, 3] is as said and the bottom is the said transform of the top.

    A `Pair` says everything about its top, down to the places.
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
    """Whether two scenes show the same, with places within `tolerance` units."""
    if a.background != b.background or len(a.things) != len(b.things):
        return False
    rest = list(b.things)
    for s in a.things:
        twins = [t for t in rest if t.look == s.look and max(abs(t.x - s.x), abs(t.y - s.y)) <= tolerance]
        if not twins:
            return False
        rest.remove(twins[0])  # boxes do not overlap, so that there is but one
    return True
