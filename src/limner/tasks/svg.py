"""SVG from strangers to pixels: checked, then drawn by resvg.

An icon set comes from anywhere, and an SVG document can name files and run scripts. So only elements that icons are
made of are drawn, references lead to the same document only, and there is no document type (and so no entity). A
document can also spell in a few lines what takes hours, or all memory, to draw: `svg_renderer.py` draws in a child
process with limits.
"""

from __future__ import annotations

import io
import re
from xml.etree import ElementTree

import numpy as np
from PIL import Image, PngImagePlugin

from limner.data.sample import Rejected
from limner.errors import UserError

MAX_BODY = 1 << 20  # characters of one icon; the longest of ten sets has 405,717

_NAMESPACES = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
_SVG, _HREFS = "{http://www.w3.org/2000/svg}", ("href", "{http://www.w3.org/1999/xlink}href")
_ELEMENTS = frozenset(  # what ten icon sets draw with
    ("svg", "g", "defs", "use", "symbol", "title", "desc", "clipPath", "mask", "linearGradient", "radialGradient",
     "stop", "path", "rect", "circle", "ellipse", "line", "polyline", "polygon", "filter", "feBlend", "feColorMatrix",
     "feComposite", "feFlood", "feGaussianBlur", "feMerge", "feMergeNode", "feOffset")
)  # fmt: skip
_REFERENCE = re.compile(r"url\(\s*['\"]?\s*([^'\")\s]*)")


def document(
    body: str, box: tuple[float, float, float, float], turns: int = 0, mirror: tuple[int, int] = (1, 1)
) -> str:
    """An SVG document around the elements `body`, drawn in `box` (left, top, width, height).

    It is mirrored by `mirror` (-1 turns the x axis, or the y axis, round), then turned clockwise by `turns` quarters.
    Raises `Rejected` if it is too long.
    """
    if len(body) > MAX_BODY:
        raise Rejected("SVG too long")
    left, top, width, height = box
    x, y = (height, width) if turns % 2 else (width, height)
    placed = f"rotate({90 * turns}) scale({mirror[0]} {mirror[1]}) translate({-left - width / 2} {-top - height / 2})"
    return f'<svg {_NAMESPACES} viewBox="{-x / 2} {-y / 2} {x} {y}"><g transform="{placed}">{body}</g></svg>'


def draw(svg: str, size: int, background: str = "white", margin: int = 0) -> np.ndarray:
    """The document in a square, uint8 [size, size, 3], of which `margin` pixels on each side stay empty; `background`
    is a color of CSS. Raises `Rejected` for what may not or cannot be drawn. Takes any time and memory, or crashes."""
    _check(svg)
    inner = size - 2 * margin
    try:
        import resvg_py
    except ImportError:
        raise UserError('drawing icons takes a package: pip install "limner[data]"') from None
    try:
        png = resvg_py.svg_to_bytes(svg, width=inner, height=inner, background=background, skip_system_fonts=True)
    except BaseException as error:  # resvg's panics are no `Exception`
        if isinstance(error, ValueError | OSError) or type(error).__name__ == "PanicException":
            raise Rejected("SVG that cannot be drawn") from None
        raise
    picture = np.asarray(PngImagePlugin.PngImageFile(io.BytesIO(bytes(png))).convert("RGB"))
    if picture.shape == (size, size, 3):
        return picture
    canvas = Image.new("RGB", (size, size), background)  # with a margin, or for an icon that is no square
    canvas.paste(Image.fromarray(picture), ((size - picture.shape[1]) // 2, (size - picture.shape[0]) // 2))
    return np.asarray(canvas)


def _check(text: str) -> None:
    """Raises `Rejected` if the document is none, or names anything outside."""
    if "<!" in text or "<?" in text:  # a document type, an entity, a processing instruction
        raise Rejected("SVG with a declaration")
    try:
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError):
        raise Rejected("SVG that is not XML") from None
    for element in root.iter():
        if (name := str(element.tag).removeprefix(_SVG)) not in _ELEMENTS:
            known = name if re.fullmatch(r"[A-Za-z]{1,20}", name) else "another kind"
            raise Rejected(f"SVG with an element that icons do not need: {known}")
        for key, value in element.items():
            targets = [value.strip()] if key in _HREFS else []
            if not all(target.startswith("#") for target in (*targets, *_REFERENCE.findall(value))):
                raise Rejected("SVG that refers to something outside")
