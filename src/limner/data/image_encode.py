"""Pictures to the bytes of a file, in memory."""

from __future__ import annotations

import io
from typing import Literal

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo


def image_bytes(
    picture: np.ndarray | Image.Image,
    kind: Literal["PNG", "JPEG"] = "PNG",
    *,
    quality: int = 95,
    optimize: bool = False,
    pnginfo: PngInfo | None = None,
) -> bytes:
    """A picture, uint8 [H, W, 3] or Pillow's, as a PNG or a JPEG.

    `quality` is of a JPEG; `optimize` takes longer for a smaller PNG, and `pnginfo` is the text in it.
    """
    if isinstance(picture, np.ndarray):
        picture = Image.fromarray(picture)
    options = {"quality": quality} if kind == "JPEG" else {"optimize": optimize, "pnginfo": pnginfo}
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()
