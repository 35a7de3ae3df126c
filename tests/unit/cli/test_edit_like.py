"""`limner edit --like`: a new picture of what a file shows."""

import pytest
from PIL import Image

from limner.cli import main
from limner.drawing import Drawing
from tiny import tiny_pipe

SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24"><path d="M3 3h18v18z"/></svg>'


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_pipe(condition_blocks=1).save_pretrained(tmp_path_factory.mktemp("model") / "follows"))


def edit(tmp_path, picture, *options):
    return main(["edit", *options, str(picture), "the same, filled", "-o", f"{tmp_path}/out.png", "--candidates", "2"])


def test_a_png_and_an_svg_are_followed(model, tmp_path):
    pytest.importorskip("resvg_py")
    (tmp_path / "icon.svg").write_text(SVG)
    Image.new("RGB", (40, 30), "red").save(tmp_path / "red.png")
    drawn = []
    for name in ("icon.svg", "red.png"):
        assert edit(tmp_path, tmp_path / name, "--like", "--model", model) == 0
        drawn.append((tmp_path / "out.png").read_bytes())
    assert drawn[0] != drawn[1]


def test_an_svg_that_limner_wrote_is_followed(model, tmp_path):
    pytest.importorskip("resvg_py")
    gray = Image.new("RGB", (24, 24), "white")
    gray.paste("black", (6, 6, 18, 18))
    drawing = Drawing(image=gray, caption="a square", score=0.5, seed=0, candidate=1, model="m")
    assert edit(tmp_path, drawing.save(tmp_path / "own.svg"), "--like", "--model", model) == 0
    assert (tmp_path / "out.png").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--like", "--keep-rows", "2"], "limner edit needs --keep-rows INT, --mask FILE or --like"),
        ([], "limner edit needs --keep-rows INT, --mask FILE or --like"),
        (["--like"], "this model takes captions alone"),  # the bundled one
    ],
)
def test_what_does_not_go_together_is_said(options, message, tmp_path, capsys):
    Image.new("RGB", (40, 30), "red").save(tmp_path / "red.png")
    assert edit(tmp_path, tmp_path / "red.png", *options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.png").exists()


def test_a_file_that_is_no_svg_is_refused(model, tmp_path, capsys):
    pytest.importorskip("resvg_py")
    (tmp_path / "icon.svg").write_bytes(b"\xff\xfe<svg")
    assert edit(tmp_path, tmp_path / "icon.svg", "--like", "--model", model) == 2
    assert "is not a usable picture" in capsys.readouterr().err
