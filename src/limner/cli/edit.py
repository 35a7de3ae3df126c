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


@dataclass(frozen=True, kw_only=True)
class Edit(DrawOrEdit):
    """Redraw a part of a picture to fit a caption: the rows below the kept ones, or the light parts of a mask. The
    candidates with the highest likelihood under the prior are written."""

    suffix: ClassVar[str] = "-edited"
    image: Positional[Path]
    """The picture, cropped to its central square."""
    caption: Positional[str]
    """Description of the whole picture, in quotes."""
    keep_rows: Annotated[int | None, Range(1, 2**16)] = None
    """Keep this number of token rows at the top and redraw the rows below."""
    mask: Path | None = None
    """A picture whose light parts mark what to redraw."""


def main(argv: Sequence[str]) -> None:
    """Redraw a part of a picture."""
    options = parse(Edit, argv, "limner edit")
    if (options.keep_rows is None) == (options.mask is None):
        raise UserError("limner edit needs either --keep-rows INT or --mask FILE: give one of the two")
    from limner.data.image_decode import decode_image
    from limner.data.sample import Rejected

    def read(path: Path) -> Any:
        from PIL import Image

        require_file(path)
        try:
            return Image.fromarray(decode_image(path.read_bytes()))
        except Rejected as rejected:
            raise UserError(f"{path} is not a usable picture: {rejected.reason}") from None

    image, mask = read(options.image), options.mask and read(options.mask)
    draw(options, options.caption, lambda pipe: pipe.prime(image, options.keep_rows, mask))
