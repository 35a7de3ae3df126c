"""`limner draw "a caption"`: draw a caption and write PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tyro.conf import Positional

from limner.cli.arguments import parse
from limner.cli.draw_common import DrawOrEdit, draw


@dataclass(frozen=True, kw_only=True)
class Draw(DrawOrEdit):
    """Draw a caption: sample candidates, score them, and write the best as PNG files.

    The same caption, seed and settings give the same picture.
    """

    caption: Positional[str]
    """Description of the picture, in quotes."""


def main(argv: Sequence[str]) -> None:
    """Draw a caption."""
    options = parse(Draw, argv, "limner draw")
    draw(options, options.caption)
