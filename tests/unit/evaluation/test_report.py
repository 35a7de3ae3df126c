"""A report is one well-formed file without network access, for any caption."""

import re
from html.parser import HTMLParser

import pytest
from PIL import Image

from limner.evaluation import report


class Checker(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.links = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "img", "path", "polyline", "br"):
            self.open.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        if tag in ("path", "polyline"):
            return
        assert self.open.pop() == tag


def test_a_page_is_well_formed_and_self_contained(tmp_path):
    picture = Image.new("RGB", (12, 12), "red")
    nasty = '<script>alert("x")</script> & "quotes"'
    body = (
        report.img_tag(picture, nasty, 96)
        + report.table([(nasty, 1.5)], ("what", "much"))
        + report.chart(nasty, {"a": [(0, 1.0), (10, 0.5), (20, float("nan"))], "b": [(0, 2.0), (5, 3.0)]})
    )
    path = report.save_page(tmp_path / "report.html", nasty, body)
    text = path.read_text()
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert "<script" not in text
    assert checker.links
    assert all(link.startswith("data:image/png;base64,") for link in checker.links)
    assert "image-rendering: pixelated" in text
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"https?://(?!www\.w3\.org)", text)


def test_a_chart_spans_its_points():
    svg = report.chart("loss", {"loss": [(0, 4.0), (50, 2.0), (100, 1.0)]})
    points = [tuple(map(float, p.split(","))) for p in re.search(r'points="([^"]+)"', svg).group(1).split()]
    assert points[0][1] < points[1][1] < points[2][1]  # falling loss, y downwards
    assert all(0 <= x <= 420 and 0 <= y <= 200 for x, y in points)
    assert "steps: 100" in svg
    assert "rank / width: 0.333" in report.chart("loss", {"loss": [(0, 4.0), (1 / 3, 2.0)]}, "rank / width")
    assert report.chart("empty", {"loss": [(0, 1.0)]}) == ""
    many = report.chart("long", {"loss": [(i, float(i)) for i in range(10_000)]})
    assert len(many) < 20_000


@pytest.mark.parametrize("rows", [1, 5])
def test_a_contact_sheet_holds_every_picture(rows, tmp_path):
    red, blue = (Image.new("RGB", (8, 8), color) for color in ("red", "blue"))
    row = report.SheetRow(caption="a word " * 20, pictures=[(red, "drawn"), (blue, "real")], right=True)
    sheet = report.contact_sheet([row] * rows, columns=2)
    colors = {color: count for count, color in sheet.getcolors(1 << 20)}
    assert colors[255, 0, 0] == colors[0, 0, 255] == rows * 144 * 144
    assert Image.open(report.save_png(sheet, tmp_path / "sheet.png")).size == sheet.size
