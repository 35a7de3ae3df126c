"""SVG from strangers to pixels: checked, then drawn by resvg.

An icon set comes from anywhere, and an SVG document can name files, run scripts, and spell in a few lines what takes
hours to draw. So only elements that icons are made of are drawn, references lead to the same document only, there is
no document type (and so no entity), and what `use`, masks, clip paths and filters repeat is counted before anything
is drawn.
"""

from __future__ import annotations

import io
import re
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from limner.data.sample import Rejected
from limner.errors import UserError

MAX_BODY = 1 << 20  # characters of one icon; the longest of ten sets has 405,717
MAX_ELEMENTS = 50_000  # with all repetitions
MAX_DEPTH = 100  # likewise

_NAMESPACES = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
_SVG, _HREFS = "{http://www.w3.org/2000/svg}", ("href", "{http://www.w3.org/1999/xlink}href")
_ELEMENTS = frozenset(  # what ten icon sets draw with
    ("svg", "g", "defs", "use", "symbol", "title", "desc", "clipPath", "mask", "linearGradient", "radialGradient",
     "stop", "path", "rect", "circle", "ellipse", "line", "polyline", "polygon", "filter", "feBlend", "feColorMatrix",
     "feComposite", "feFlood", "feGaussianBlur", "feMerge", "feMergeNode", "feOffset")
)  # fmt: skip
_REFERENCE = re.compile(r"url\(\s*['\"]?\s*([^'\")\s]*)")
_NAMES = re.compile(r"#[\w-]*")  # of colors and of elements
_LARGE = re.compile(r"(?<![\d.])\d{8,}|[\d.][eE]\+?0*([4-9]|[1-9]\d)")  # numbers that resvg's sums may overflow with
#: What a reference to these repeats; a gradient that names another takes its stops, which is nothing to draw.
_REPEATING = ("mask", "clip-path", "filter", "style")


def document(
    body: str, box: tuple[float, float, float, float], turns: int = 0, mirror: tuple[int, int] = (1, 1)
) -> str:
    """An SVG document around the elements `body`, drawn in `box` (left, top, width, height).

    It is mirrored by `mirror` (-1 turns the x axis, or the y axis, round), then turned clockwise by `turns` quarters.
    Raises `Rejected` for what may not be drawn.
    """
    if len(body) > MAX_BODY:
        raise Rejected("SVG too long")
    left, top, width, height = box
    x, y = (height, width) if turns % 2 else (width, height)
    placed = f"rotate({90 * turns}) scale({mirror[0]} {mirror[1]}) translate({-left - width / 2} {-top - height / 2})"
    text = f'<svg {_NAMESPACES} viewBox="{-x / 2} {-y / 2} {x} {y}"><g transform="{placed}">{body}</g></svg>'
    _check(text)
    return text


def draw(svg: str, size: int, background: str = "white", margin: int = 0) -> np.ndarray:
    """The document in a square, uint8 [size, size, 3], of which `margin` pixels on each side stay empty; `background`
    is a color of CSS. Raises `Rejected`."""
    inner = size - 2 * margin
    try:
        import resvg_py
    except ImportError:
        raise UserError('drawing icons takes a package: pip install "limner[data]"') from None
    try:
        png = resvg_py.svg_to_bytes(svg, width=inner, height=inner, background=background, skip_system_fonts=True)
        picture = np.asarray(Image.open(io.BytesIO(bytes(png))).convert("RGB"))
    except BaseException as error:  # resvg's panics are no `Exception`
        if isinstance(error, ValueError | OSError) or type(error).__name__ == "PanicException":
            raise Rejected("SVG that cannot be drawn") from None
        raise
    if picture.shape == (size, size, 3):
        return picture
    canvas = Image.new("RGB", (size, size), background)  # with a margin, or for an icon that is no square
    canvas.paste(Image.fromarray(picture), ((size - picture.shape[1]) // 2, (size - picture.shape[0]) // 2))
    return np.asarray(canvas)


def _check(text: str) -> None:
    """Raises `Rejected` if the document is none, names anything outside, or draws too much."""
    if "<!" in text or "<?" in text:  # a document type, an entity, a processing instruction
        raise Rejected("SVG with a declaration")
    try:
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError):
        raise Rejected("SVG that is not XML") from None
    named: dict[str, ElementTree.Element] = {}
    for element in root.iter():
        if (name := str(element.tag).removeprefix(_SVG)) not in _ELEMENTS:
            known = name if re.fullmatch(r"[A-Za-z]{1,20}", name) else "another kind"
            raise Rejected(f"SVG with an element that icons do not need: {known}")
        named.setdefault(element.get("id", ""), element)
        if any(key != "id" and _LARGE.search(_NAMES.sub("", value)) for key, value in element.items()):
            raise Rejected("SVG with a number that is too large")
        for target in _targets(element):
            if not target.startswith("#"):
                raise Rejected("SVG that refers to something outside")
    _count(root, named, {}, ())


def _targets(element: ElementTree.Element, attributes: tuple[str, ...] = ()) -> list[str]:
    """What these attributes of an element refer to, or all."""
    values = [(key, value) for key, value in element.items() if not attributes or key in attributes]
    links = [value.strip() for key, value in values if key in _HREFS]
    return links + [target for _, value in values for target in _REFERENCE.findall(value)]


def _count(
    element: ElementTree.Element,
    named: dict[str, ElementTree.Element],
    counted: dict[ElementTree.Element, tuple[int, int]],
    above: tuple[ElementTree.Element, ...],
) -> tuple[int, int]:
    """Elements that drawing this one takes, and how deep they lie in each other. Raises `Rejected`."""
    if element in above:
        raise Rejected("SVG that refers to itself")
    if len(above) > MAX_DEPTH:
        raise Rejected("SVG too deep")
    if element not in counted:
        repeated = (*_HREFS, *_REPEATING) if element.tag == f"{_SVG}use" else _REPEATING
        below = [*element, *(named[name[1:]] for name in _targets(element, repeated) if name[1:] in named)]
        found = [_count(one, named, counted, (*above, element)) for one in below]
        counted[element] = 1 + sum(n for n, _ in found), 1 + max((depth for _, depth in found), default=0)
    elements, depth = counted[element]
    if elements > MAX_ELEMENTS:
        raise Rejected("SVG too large")
    if len(above) + depth > MAX_DEPTH:
        raise Rejected("SVG too deep")
    return elements, depth
