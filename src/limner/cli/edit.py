"""`limner edit PICTURE "a caption"`: redraw a part of a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from tyro.conf import Positional

from limner.atomic_io import require_file
from limner.cli.arguments import parse
from limner.cli.draw import DrawOrEdit, draw
from limner.errors import UserError
from limner.validation import Range

_SVG_SIDE = 384  # pixels


@dataclass(frozen=True, kw_only=True)
class Edit(DrawOrEdit):
    """Redraw a part of a picture to fit a caption: the rows below the kept ones, or the light parts of a mask. The
    candidates with the highest likelihood under the prior are written. With --like, draw another picture like it."""

    suffix: ClassVar[str] = "-edited"
    image: Positional[Path]
    """The picture, cropped to its central square; with --like also an SVG file."""
    caption: Positional[str]
    """Description of the whole picture, in quotes."""
    keep_rows: Annotated[int | None, Range(1, 2**16)] = None
    """Keep this number of token rows at the top and redraw the rows below."""
    mask: Path | None = None
    """A picture whose light parts mark what to redraw."""
    like: bool = False
    """Draw a new picture of what the picture shows, as the caption says: "the same, filled". For models that were
    trained with pictures to follow."""


def main(argv: Sequence[str]) -> None:
    """Redraw a part of a picture."""
    options = parse(Edit, argv, "limner edit")
    if (options.keep_rows is not None) + (options.mask is not None) + options.like != 1:
        raise UserError("limner edit needs --keep-rows INT, --mask FILE or --like: give one of the three")
    image, mask = _read(options.image, options.like), options.mask and _read(options.mask)

    def prime(pipe: Any) -> Any:
        return pipe.like(image) if options.like else pipe.prime(image, options.keep_rows, mask)

    draw(options, options.caption, prime)


def _read(path: Path, svg: bool = False) -> Any:
    """Read a picture, or draw an SVG file. Raises `UserError` if it is not usable."""
    from PIL import Image

    from limner.data.image_decode import decode_image
    from limner.data.sample import Rejected

    require_file(path)
    try:
        if not (svg and path.suffix.lower() == ".svg"):
            return Image.fromarray(decode_image(path.read_bytes()))
        from limner.tasks.svg import SVGRenderer, without_metadata

        with SVGRenderer() as renderer:
            text = path.read_text(encoding="utf-8", errors="replace")
            return Image.fromarray(renderer.render(without_metadata(text), _SVG_SIDE))
    except Rejected as rejected:
        raise UserError(f"{path} is not a usable picture: {rejected.reason}") from None
