"""Encode pictures as PNG or JPEG in memory."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image


def image_bytes(picture: np.ndarray | Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Encode a picture, uint8 [H, W, 3] or Pillow's, as PNG or JPEG. `options` are those of Pillow's encoder."""
    buffer = io.BytesIO()
    (Image.fromarray(picture) if isinstance(picture, np.ndarray) else picture).save(buffer, kind, **options)
    return buffer.getvalue()
