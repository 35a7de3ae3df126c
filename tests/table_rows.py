"""Rows of tables that tests write, and what a source makes of them."""

import io

from PIL import Image

from limner.data.sample import Rejected


def png(n=0):
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (n % 256, 3, 4)).save(buffer, "PNG")
    return buffer.getvalue()


def outcomes(source):
    """For each element its first caption, or in brackets why it is rejected."""
    found = []
    for index in range(len(source)):
        try:
            found.append(source[index].captions[0])
        except Rejected as rejected:
            found.append(f"[{rejected.reason}]")
    return found
