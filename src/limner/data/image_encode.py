"""Encode pictures as PNG or JPEG in memory."""

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
    optimize: bool = False,
    pnginfo: PngInfo | None = None,
) -> bytes:
    """Encode a picture, uint8 [H, W, 3] or Pillow's, as PNG or as JPEG of quality 95.

    For PNG, `optimize` spends time on a smaller file and `pnginfo` adds text.
    """
    if isinstance(picture, np.ndarray):
        picture = Image.fromarray(picture)
    options = {"quality": 95} if kind == "JPEG" else {"optimize": optimize, "pnginfo": pnginfo}
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()
