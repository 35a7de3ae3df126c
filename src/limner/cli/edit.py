"""`limner edit PICTURE "a caption"`: see `limner.cli.draw`."""

from limner.cli.draw import edit as main

__all__ = ["main"]
