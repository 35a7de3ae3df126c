"""An icon survives the way to SVG and back, and the document is valid for every caption and picture."""

import io
import re
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import resvg_py
from PIL import Image, ImageDraw

from limner.cli import main
from limner.drawing import SOURCE_TYPE, Drawing
from limner.errors import UserError
from limner.models.dvae import DVAE
from limner.vectorize import to_svg
from tiny import WORDS, tiny_pipe

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "a </title><script>&x;\x1b[31m\0 \ud800 \ufffe ]]> 'fox' \"é🎨"


def icon(draw, size=48, fine=8):
    """A picture, from a function that draws on a canvas of 24 units."""
    canvas = Image.new("L", (size * fine, size * fine), 255)
    draw(ImageDraw.Draw(canvas), size * fine / 24)
    gray = np.asarray(canvas, np.float32).reshape(size, fine, size, fine).mean((1, 3))
    return np.rint(gray).astype(np.uint8)[..., None].repeat(3, -1)


def ring(canvas, unit):
    canvas.ellipse([3 * unit, 3 * unit, 21 * unit, 21 * unit], outline=0, width=round(2 * unit))


def line(canvas, unit):
    canvas.line([4 * unit, 5 * unit, 20 * unit, 17.3 * unit], fill=0, width=round(0.8 * unit))


def square(canvas, unit):
    canvas.rectangle([5.2 * unit, 4.1 * unit, 18.7 * unit, 20 * unit], fill=0)


def two_grays(canvas, unit):
    canvas.rectangle([4 * unit, 8 * unit, 20 * unit, 20 * unit], fill=204, outline=0, width=round(1.5 * unit))
    canvas.ellipse([8 * unit, 1 * unit, 16 * unit, 6 * unit], fill=204)


def gray_stroke(canvas, unit):
    canvas.line([4 * unit, 6.2 * unit, 20 * unit, 6.2 * unit], fill=128, width=round(1.5 * unit))
    ring(canvas, unit)


def rendered(svg, size):
    png = resvg_py.svg_to_bytes(svg, width=size, height=size, background="white", skip_system_fonts=True)
    return np.asarray(Image.open(io.BytesIO(bytes(png))).convert("RGB"))


def paths(svg):
    return ElementTree.fromstring(svg).findall(f"{SVG}path")


@pytest.mark.parametrize("size", [48, 64])
@pytest.mark.parametrize(
    ("draw", "decibels"), [(ring, 30), (line, 40), (square, 30), (two_grays, 30), (gray_stroke, 30)]
)
def test_the_document_draws_the_picture_with_few_curves(draw, decibels, size):
    picture = icon(draw, size)
    svg = to_svg(picture)
    assert 10 * np.log10(255**2 / np.mean((rendered(svg, size) - picture.astype(float)) ** 2)) > decibels
    assert [path.get("opacity") for path in paths(svg)] == {
        two_grays: [".2", None], gray_stroke: [".5", None],
    }.get(draw, [None])  # fmt: skip
    assert len(svg) < 1_500


def test_blur_and_noise_of_a_decoder_change_little():
    noise = np.random.default_rng(0).normal(0, 6, (48, 48, 1))
    for draw, levels in (ring, 1), (square, 1), (two_grays, 2):
        picture = icon(draw)
        blurred = (picture + np.roll(picture.astype(float), 1, 0) + np.roll(picture.astype(float), 1, 1)) / 3
        svg = to_svg(np.clip(blurred + noise, 0, 255).astype(np.uint8))
        assert len(paths(svg)) == levels, draw
        assert len(svg) < 3_000
        assert np.mean((rendered(svg, 48) - blurred) ** 2) < 255**2 / 10**2.2


def test_a_square_has_straight_edges_and_a_ring_has_a_hole():
    assert re.sub("[^a-zA-Z]", "", paths(to_svg(icon(square)))[0].get("d")).count("l") >= 4
    data = paths(to_svg(icon(ring)))[0].get("d")
    assert data.count("M") == data.count("z") == 2 and data.count("c") < 40
    assert not re.search(r"\.\d{3}|e", data)


def test_blank_dark_inverted_and_oblong_pictures():
    white = np.full((48, 48, 3), 255, np.uint8)
    assert paths(to_svg(white)) == []
    assert (rendered(to_svg(0 * white), 48) < 128).all()
    assert np.mean(abs(rendered(to_svg(255 - icon(ring)), 48) - (255.0 - icon(ring)))) < 6
    assert 'viewBox="0 0 24 12"' in to_svg(white[:24])
    assert len(paths(to_svg(np.maximum(icon(ring), 100)))) == 1  # the darkest gray is the foreground
    assert to_svg(white[:2, :2])


def test_a_picture_with_colors_is_an_error():
    picture = icon(square)
    picture[10:40, 10:40] = 200, 30, 30
    with pytest.raises(UserError, match="has colors"):
        to_svg(picture)


def test_hostile_captions_stay_text():
    drawing = Drawing(
        image=Image.fromarray(icon(ring)), caption=HOSTILE, score=0.5, seed=3, candidate=2, model="a<b>&",
        settings={"top_k": 5, "top_p": None},
    )  # fmt: skip
    svg = drawing.svg()
    root = ElementTree.fromstring(svg)
    assert {element.tag.removeprefix(SVG) for element in root} == {"title", "metadata", "path"}
    title, metadata = root.findtext(f"{SVG}title"), "".join(root.find(f"{SVG}metadata").itertext())
    assert "</title><script>&x;\\x1b[31m\\x00 \\ud800 \\ufffe ]]>" in title and title in metadata
    for text in ("seed: 3; candidate: 2; score: 0.5000; model: a<b>&; top_k: 5", SOURCE_TYPE):
        assert text in metadata
    assert not re.search("<script|href|<!|<\\?", svg)
    assert not [character for character in svg if ord(character) < 32 and character != "\n"]


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "contourpy", None)
    with pytest.raises(UserError, match=r'need the contourpy package: pip install "limner\[svg\]"'):
        to_svg(icon(ring))


# ---------------------------------------------------------------------------- commands


@pytest.fixture
def gray(monkeypatch):
    """A bundle's dVAE draws in grays."""
    decode = DVAE.decode_tokens
    monkeypatch.setattr(
        DVAE, "decode_tokens", lambda *a, **k: (p := decode(*a, **k)).float().mean(1, True).expand_as(p).to(p.dtype)
    )


def test_draw_and_edit_write_an_svg_for_each_png(gray, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    tiny_pipe().save_pretrained("tiny")
    options = ["--model", "tiny", "--candidates", "3"]
    assert main(["draw", WORDS[1], *options, "-n", "2", "-o", "out/a.png", "--svg"]) == 0
    assert {path.name for path in tmp_path.glob("out/*")} == {"a-1.png", "a-2.png", "a-1.svg", "a-2.svg"}
    assert capsys.readouterr().out.splitlines()[2:] == ["out/a-1.svg", "out/a-2.svg"]
    for name in ("a-1", "a-2"):
        root, png = ElementTree.parse(f"out/{name}.svg").getroot(), Image.open(f"out/{name}.png")
        assert root.findtext(f"{SVG}title") == WORDS[1] == png.text["caption"]
        assert f"candidate: {png.text['candidate']};" in root.findtext(f"{SVG}metadata")
    assert main(["edit", "out/a-1.png", WORDS[0], *options, "--keep-rows", "3", "-o", "b.png", "--svg"]) == 0
    assert (tmp_path / "b.svg").is_file() and (tmp_path / "b.png").is_file()


def test_errors_of_svg_output_are_raised_before_drawing(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.svg").mkdir()
    asked = ["draw", WORDS[1], "--model", "none", "--svg"]
    assert main([*asked, "-o", "a.png"]) == 2
    assert "a.svg is a folder" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "contourpy", None)
    assert main([*asked, "-o", "b.png"]) == 2
    assert "contourpy" in capsys.readouterr().err
