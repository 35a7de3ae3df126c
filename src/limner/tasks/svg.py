"""Renderer of untrusted SVG: documents are checked, then drawn by resvg.

Icon sets are untrusted, and an SVG document can name files and run scripts. So only elements that icons use are
allowed, references must point into the same document, and a document type (and so an entity) is rejected. A short
document can also take hours, or all memory, to draw: `svg_renderer.py` draws in a child process with limits.
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
_ELEMENTS = frozenset(  # used by ten icon sets
    ("svg", "g", "defs", "use", "symbol", "title", "desc", "clipPath", "mask", "linearGradient", "radialGradient",
     "stop", "path", "rect", "circle", "ellipse", "line", "polyline", "polygon", "filter", "feBlend", "feColorMatrix",
     "feComposite", "feFlood", "feGaussianBlur", "feMerge", "feMergeNode", "feOffset")
)  # fmt: skip
_REFERENCE = re.compile(r"url\(\s*['\"]?\s*([^'\")\s]*)")


def document(
    body: str, box: tuple[float, float, float, float], turns: int = 0, mirror: tuple[int, int] = (1, 1)
) -> str:
    """Return an SVG document with the elements `body`, drawn in `box` (left, top, width, height).

    `mirror` is -1 for each axis to flip (x, y). `turns` quarter turns clockwise follow. Raises `Rejected` if `body` is
    longer than `MAX_BODY`.
    """
    if len(body) > MAX_BODY:
        raise Rejected("SVG too long")
    left, top, width, height = box
    x, y = (height, width) if turns % 2 else (width, height)
    transform = (
        f"rotate({90 * turns}) scale({mirror[0]} {mirror[1]}) translate({-left - width / 2} {-top - height / 2})"
    )
    return f'<svg {_NAMESPACES} viewBox="{-x / 2} {-y / 2} {x} {y}"><g transform="{transform}">{body}</g></svg>'


def draw(svg: str, size: int, background: str = "white", margin: int = 0) -> np.ndarray:
    """Draw a document in a square, uint8 [size, size, 3], with `margin` empty pixels on each side; `background` is a
    CSS color. Raises `Rejected` for forbidden or invalid documents, `UserError` without resvg. Time and memory are
    unlimited, and resvg may crash."""
    _check(svg)
    inner = size - 2 * margin
    try:
        import resvg_py
    except ImportError:
        raise UserError('drawing icons needs the resvg-py package: pip install "limner[data]"') from None
    try:
        png = resvg_py.svg_to_bytes(svg, width=inner, height=inner, background=background, skip_system_fonts=True)
    except BaseException as error:  # resvg's panics do not derive from `Exception`
        if isinstance(error, ValueError | OSError) or type(error).__name__ == "PanicException":
            raise Rejected("SVG that cannot be drawn") from None
        raise
    picture = np.asarray(PngImagePlugin.PngImageFile(io.BytesIO(bytes(png))).convert("RGB"))
    if picture.shape == (size, size, 3):
        return picture
    canvas = Image.new("RGB", (size, size), background)  # with a margin, or for an icon that is not square
    canvas.paste(Image.fromarray(picture), ((size - picture.shape[1]) // 2, (size - picture.shape[0]) // 2))
    return np.asarray(canvas)


def _check(text: str) -> None:
    """Raise `Rejected` for invalid XML, a declaration, a forbidden element or an external reference."""
    if "<!" in text or "<?" in text:  # a document type, an entity, a processing instruction
        raise Rejected("SVG with a declaration")
    try:
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError):
        raise Rejected("SVG that is not XML") from None
    for element in root.iter():
        if (name := str(element.tag).removeprefix(_SVG)) not in _ELEMENTS:
            shown = name if re.fullmatch(r"[A-Za-z]{1,20}", name) else "another kind"
            raise Rejected(f"SVG with an element that icons do not need: {shown}")
        for key, value in element.items():
            targets = [value.strip()] if key in _HREFS else []
            if not all(target.startswith("#") for target in (*targets, *_REFERENCE.findall(value))):
                raise Rejected("SVG that refers to something outside")
