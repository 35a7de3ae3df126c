"""Result pages: a contact sheet, and a web page in one file without network access.

Pictures are data URIs, curves are inline SVG, colors follow the reader's light or dark scheme. Captions and names are
escaped. All pages use these functions. Curves are our own SVG because matplotlib is an optional package.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from limner.atomic_io import atomic_write_bytes, atomic_write_text
from limner.data.image_encode import image_bytes

Picture = Image.Image
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class SheetRow:
    """A caption of a contact sheet with its pictures.

    Attributes:
        pictures: from left to right, each with its label.
        right: verdict on the first picture; None if it is unknown.
    """

    caption: str
    pictures: Sequence[tuple[Picture, str]]
    right: bool | None = None


# ---------------------------------------------------------------------------- contact sheet


def contact_sheet(rows: Sequence[SheetRow], columns: int) -> Picture:
    """Render all rows on one picture, in `columns` columns; pictures are enlarged to 144 pixels."""
    font, small = ImageFont.load_default(14), ImageFont.load_default(12)
    side, gap, text_height = 144, 12, 66  # pixels
    width = max(len(row.pictures) for row in rows) * (side + gap) + gap
    height = side + text_height + gap
    columns = min(columns, len(rows))
    sheet = Image.new("RGB", (columns * width, math.ceil(len(rows) / columns) * height + gap), "white")
    draw = ImageDraw.Draw(sheet)
    for i, row in enumerate(rows):
        x, y = i % columns * width + gap, i // columns * height + gap
        for line, text in enumerate(wrap(row.caption, font, width - 2 * gap)[:2]):
            draw.text((x, y + line * 17), text, "black", font)
        for picture, label in row.pictures:
            sheet.paste(picture.convert("RGB").resize((side, side), Image.Resampling.NEAREST), (x, y + 38))
            good = {True: "#1a7f37", False: "#cf222e", None: "#555555"}[row.right]
            draw.text((x, y + 40 + side), label, good if picture is row.pictures[0][0] else "#555555", small)
            x += side + gap
    return sheet


def wrap(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> list[str]:
    """Wrap a text into lines of at most `width` pixels, except for longer words."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def save_png(picture: Picture, path: str | Path) -> Path:
    """Write a PNG file atomically."""
    path = Path(path)
    atomic_write_bytes(path, image_bytes(picture, optimize=True))
    return path


# ---------------------------------------------------------------------------- web page


def img_tag(picture: Picture, alt: str, side: int) -> str:
    """Return an <img> of `side` CSS pixels with the picture as a data URI."""
    data = base64.b64encode(image_bytes(picture, optimize=True)).decode()
    return f'<img src="data:image/png;base64,{data}" alt="{escape(alt)}" width="{side}" height="{side}" loading="lazy">'


def table(rows: Sequence[Sequence[object]], header: Sequence[str] = ()) -> str:
    """Return a <table> with escaped cells."""

    def line(cells: Sequence[object], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    head = f"<thead>{line(header, 'th')}</thead>" if header else ""
    return f"<table>{head}<tbody>{''.join(line(row, 'td') for row in rows)}</tbody></table>"


def chart(title: str, curves: Mapping[str, Points], x_label: str = "steps") -> str:
    """Return curves as inline SVG with the limits of both axes; empty if no curve has two finite points."""
    finite = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in curves.items()}
    finite = {name: points for name, points in finite.items() if len(points) > 1}
    if not finite:
        return ""
    xs = [x for points in finite.values() for x, _ in points]
    ys = [y for points in finite.values() for _, y in points]
    width, height = 420, 200
    left, bottom, top = 64, height - 22, 26
    x0, x1, y0, y1 = min(xs), max(xs), min(ys), max(ys)

    def to_pixels(x: float, y: float) -> str:
        px = left + (x - x0) / ((x1 - x0) or 1) * (width - left - 8)
        py = bottom - (y - y0) / ((y1 - y0) or 1) * (bottom - top)
        return f"{px:.1f},{py:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {width} {height}" width="{width}" '
        f'role="img" aria-label="{escape(title)}">',
        f'<text x="{left}" y="14" class="title">{escape(title)}</text>',
        f'<path class="axis" d="M{left},{top}V{bottom}H{width - 8}"/>',
        f'<text x="{left - 6}" y="{top + 4}" text-anchor="end">{_format_number(y1)}</text>',
        f'<text x="{left - 6}" y="{bottom}" text-anchor="end">{_format_number(y0)}</text>',
        f'<text x="{left}" y="{height - 6}">{_format_number(x0)}</text>',
        f'<text x="{width - 8}" y="{height - 6}" text-anchor="end">{escape(x_label)}: {_format_number(x1)}</text>',
    ]
    for i, (name, points) in enumerate(finite.items()):
        sampled = [*points[: -1 : math.ceil(len(points) / 400)], points[-1]]  # enough points for the width
        line = " ".join(to_pixels(x, y) for x, y in sampled)
        color, name = f"var(--c{i % 4})", escape(name)
        parts.append(f'<polyline style="stroke: {color}" points="{line}"><title>{name}</title></polyline>')
        if len(finite) > 1:
            y = top + 4 + 15 * i
            parts.append(f'<text x="{width - 12}" y="{y}" text-anchor="end" style="fill: {color}">{name}</text>')
    return "".join(parts) + "</svg>"


def _format_number(number: float) -> str:
    return f"{number:,.0f}" if number == round(number) else f"{number:.3g}"


_STYLE = """
:root { color-scheme: light dark; --ink: #1d2026; --dim: #5c6470; --page: #fff; --card: #f5f6f8; --line: #d9dce2;
  --good: #1a7f37; --bad: #cf222e; --c0: #2563eb; --c1: #d97706; --c2: #059669; --c3: #9333ea }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ec; --dim: #9aa3b0; --page: #14161a; --card: #1d2026;
  --line: #343942; --good: #4ac26b; --bad: #ff7b72; --c0: #7aa2ff; --c1: #f0b35a; --c2: #4fd1a5; --c3: #c79bff } }
body { margin: 0 auto; padding: 2rem 1rem 4rem; max-width: 66rem; color: var(--ink); background: var(--page);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.7rem; margin: 0 0 .3rem } h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem }
.lead { font-size: 1.1rem; max-width: 46rem } .dim, figcaption, small { color: var(--dim) }
.good { color: var(--good) } .bad { color: var(--bad) }
article { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 1rem; margin: 0 0 1rem }
article h3 { margin: 0 0 .6rem; font-size: 1.05rem }
.pair { display: flex; flex-wrap: wrap; gap: 1rem } figure { margin: 0 } figcaption { font-size: .85rem }
img { image-rendering: pixelated; border-radius: 4px; display: block }
.strip { display: flex; flex-wrap: wrap; gap: 4px; margin-top: .8rem } .strip img { border: 2px solid transparent }
.strip img.chosen { border-color: var(--c0) } .strip img.right { border-bottom-color: var(--good) }
.sheet, .scroll + .charts { margin-top: .8rem }
.sheet { display: flex; flex-wrap: wrap; gap: 1rem } .sheet article { margin: 0 } .scroll { overflow-x: auto }
pre { overflow-x: auto; background: var(--card); padding: .6rem } details { margin-top: .6rem }
@media print { article, tr { break-inside: avoid } }
table { border-collapse: collapse; font-size: .92rem } td, th { text-align: left; padding: .25rem 1rem .25rem 0;
  border-bottom: 1px solid var(--line); vertical-align: top } td { font-variant-numeric: tabular-nums }
.charts { display: flex; flex-wrap: wrap; gap: 1rem } .chart { max-width: 100%; height: auto; background: var(--card);
  border: 1px solid var(--line); border-radius: 8px }
.chart text { font: 11px system-ui, sans-serif; fill: var(--dim) } .chart .title { fill: var(--ink); font-size: 12px }
.chart .axis { fill: none; stroke: var(--line) } .chart polyline { fill: none; stroke-width: 1.6 }
"""


def chart_svg(chart: str) -> str:
    """Return a chart as the content of an .svg file, with its style sheet."""
    head, _, rest = chart.partition(">")
    return f"{head}><style>{_STYLE}</style>{rest}\n"


def save_page(path: str | Path, title: str, body: str) -> Path:
    """Write an HTML document with the body atomically."""
    document = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>{body}</body></html>\n"
    )
    atomic_write_text(path, document)
    return Path(path)
