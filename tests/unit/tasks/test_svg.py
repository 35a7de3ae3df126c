"""SVG from strangers: drawn as it says, nothing dangerous drawn, and a child process with limits on time and memory."""

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from limner.data.sample import Rejected
from limner.errors import UserError
from limner.tasks.svg import MAX_BODY, SVGRenderer, document, draw, without_metadata

BOX = (0.0, 0.0, 8.0, 8.0)
CORNER = '<path fill="#f00" d="M0 0h4v4H0z"/>'  # red in the upper left quarter


def quarters(picture: np.ndarray) -> list[list[str]]:
    """ "red", or "white", for each quarter of a picture."""
    half = len(picture) // 2
    found = [[picture[y + half // 2, x + half // 2] for x in (0, half)] for y in (0, half)]
    return [["red" if tuple(color) == (255, 0, 0) else "white" for color in row] for row in found]


@pytest.mark.parametrize(
    ("turns", "mirror", "at"),
    [(0, (1, 1), (0, 0)), (1, (1, 1), (0, 1)), (2, (1, 1), (1, 1)), (3, (1, 1), (1, 0)), (0, (-1, 1), (0, 1)),
     (0, (1, -1), (1, 0)), (1, (-1, 1), (1, 1))],
)  # fmt: skip
def test_turns_go_clockwise_after_mirroring(turns, mirror, at):
    found = quarters(draw(document(CORNER, BOX, turns, mirror), 16))
    assert [(y, x) for y in (0, 1) for x in (0, 1) if found[y][x] == "red"] == [at]


def test_a_rectangular_box_is_centered_on_the_background():
    wide = draw(document('<path d="M-4 2h8v4h-8z" fill="#f00"/>', (-4.0, 2.0, 8.0, 4.0)), 16, "blue")
    assert wide.shape == (16, 16, 3)
    assert (wide[:3] == (0, 0, 255)).all() and (wide[5:11] == (255, 0, 0)).all() and (wide[13:] == (0, 0, 255)).all()
    turned = draw(document('<path d="M-4 2h8v4h-8z" fill="#f00"/>', (-4.0, 2.0, 8.0, 4.0), turns=1), 16)
    assert (turned[:, 5:11] == (255, 0, 0)).all() and (turned[:, :3] == 255).all()


def test_half_transparent_parts_are_blended_with_the_background():
    picture = draw(document('<path d="M0 0h8v8H0z" fill="#000" fill-opacity=".5"/>', BOX), 8, "#ff0000")
    assert np.abs(picture.astype(int) - (127, 0, 0)).max() <= 2


def test_what_editors_write_beside_the_drawing_is_left_out():
    text = f"""<?xml version="1.0" encoding="UTF-8"?>
    <!-- Generator: an editor -->
    <!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN" "http://www.w3.org/Graphics/SVG/1.1/DTD/svg11.dtd">
    <svg xmlns="http://www.w3.org/2000/svg" xmlns:e="urn:editor" viewBox="0 0 8 8" e:version="1"><e:view e:x="1"/>
    <metadata>words<e:a><e:b/></e:a></metadata><g><!-- a layer --><e:data/>{CORNER}<metadata/></g></svg>"""
    with pytest.raises(Rejected, match="declaration"):
        draw(text, 16)
    assert quarters(draw(without_metadata(text), 16)) == [["red", "white"], ["white", "white"]]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('<!DOCTYPE a [<!ENTITY b "c">]><svg>&b;</svg>', "not XML"),
        ("<svg", "not XML"),
        ("<g>" * 20_000 + "</g>" * 20_000, "too deeply nested"),
        (document("<script>alert(1)</script>", BOX), "script"),
        (document('<use href="other.svg#a"/>', BOX), "outside"),
    ],
)
def test_a_document_without_metadata_is_checked_as_others(text, reason):
    with pytest.raises(Rejected, match=reason):
        draw(without_metadata(text), 16)


def test_references_within_the_document_are_drawn():
    body = '<defs><path id="a" fill="#f00" d="M0 0h4v4H0z"/></defs><use href="#a"/><use xlink:href="#a" x="4" y="4"/>'
    assert quarters(draw(document(body, BOX), 16)) == [["red", "white"], ["white", "red"]]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("<path", "not XML"),
        ("</g></svg><svg>", "not XML"),
        ('<!DOCTYPE a [<!ENTITY b "c">]>', "declaration"),
        ("<?xml-stylesheet href='a'?>", "declaration"),
        ("<!-- a comment --><script>alert(1)</script>", "declaration"),
        ("<script>alert(1)</script>", "script"),
        ('<image href="file:///etc/passwd"/>', "image"),
        ("<foreignObject/>", "foreignObject"),
        ("<text>words</text>", "text"),
        ('<a:b xmlns:a="urn:c"/>', "another kind"),
        ('<use href="other.svg#a"/>', "outside"),
        ('<use xlink:href="http://example.org/a.svg#a"/>', "outside"),
        ('<path fill="url(http://example.org/a)" d="M0 0h8v8z"/>', "outside"),
        ("<path style=\"fill:url( 'file:///a' )\" d='M0 0h8v8z'/>", "outside"),
        (" " * (MAX_BODY + 1), "too long"),
        ('<path stroke="#000" stroke-width="1e30" d="M0 0h8v8H0z"/>', "cannot be drawn"),  # resvg panics
    ],
)  # fmt: skip
def test_forbidden_documents_are_rejected_with_a_reason(body, reason):
    with pytest.raises(Rejected, match=reason):
        draw(document(body, BOX), 16)


def test_references_in_a_circle_draw_nothing():
    mask = '<mask id="m"><path mask="url(#m)" d="M0 0h8v8z"/></mask><path mask="url(#m)" d="M0 0h8v8z"/>'
    for body in (mask, '<g id="a"><use href="#a"/></g>'):
        assert (draw(document(body, BOX), 16) == 255).all()


ENDLESS = '<path stroke="#000" stroke-width=".1" stroke-dasharray=".0001" d="M0 0h8v8H0z"/>' * 9_000
PLAIN = document('<path fill="#f00" d="M0 0h4v4H0z"/>', BOX)


@pytest.fixture(scope="module")
def renderer():
    with SVGRenderer(0.2) as renderer:
        yield renderer


def child(renderer):
    return renderer.process.pid


def cpu_ticks(pid):
    """Return the user time of a process, the fourteenth field of its stat file, in hundredths of a second."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


def interrupt_during_rendering(pid, idle_ticks):
    while cpu_ticks(pid) < idle_ticks + 10:  # reading the document takes less
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("options", [(16,), (64, "#fe8"), (33, "blue", 5)])
def test_pixels_equal_those_drawn_without_a_child(renderer, options):
    wide = document('<path d="M-4 2h8v3h-8z" fill="#f00" opacity=".3"/>', (-4.0, 2.0, 8.0, 4.0), 1, (1, -1))
    before = child(renderer)
    for svg in (PLAIN, wide):
        assert np.array_equal(renderer.render(svg, *options), draw(svg, *options))
    assert child(renderer) == before


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (ENDLESS, "SVG that takes too long"),
        ("<g>" * 90_000 + "</g>" * 90_000, "SVG that crashes resvg or takes too much memory"),
        ("<image/>", "SVG with an element that icons do not need: image"),
        ("\ud800", "SVG that is not XML"),
        ('<path stroke="#000" stroke-width="1e30" d="M0 0h8v8H0z"/>', "SVG that cannot be drawn"),
    ],
)
def test_a_failed_rendering_gives_a_reason_and_the_next_one_succeeds(renderer, body, reason, capfd):
    begun = time.monotonic()
    with pytest.raises(Rejected, match=f"^{reason}$"):
        renderer.render(document(body, BOX), 32)
    assert time.monotonic() - begun < 20  # on a busy machine; without a limit it is over a minute
    assert np.array_equal(renderer.render(PLAIN, 32), draw(PLAIN, 32))
    assert capfd.readouterr() == ("", "")  # nothing of a panic


def test_a_child_that_is_killed_is_replaced(renderer):
    before = child(renderer)
    os.kill(before, signal.SIGKILL)
    with pytest.raises(Rejected, match="crashes"):
        renderer.render(PLAIN, 32)
    assert np.array_equal(renderer.render(PLAIN, 32), draw(PLAIN, 32)) and child(renderer) != before


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux has processor times in /proc")
def test_an_interruption_ends_a_rendering():
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process of a shell ignores it
    try:
        with SVGRenderer(60) as renderer:
            arguments = child(renderer), cpu_ticks(child(renderer))
            threading.Thread(target=interrupt_during_rendering, args=arguments, daemon=True).start()
            with pytest.raises(KeyboardInterrupt):
                renderer.render(document(ENDLESS, BOX), 32)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert renderer.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("resvg_py", "drawing icons needs the resvg-py package: pip install"),
        ("PIL", "does not start .*ImportError: torn.*: reinstall"),
    ],
)
def test_a_missing_package_is_an_error_of_the_installation(tmp_path, monkeypatch, module, says):
    (tmp_path / f"{module}.py").write_text("raise ImportError('torn')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=says), SVGRenderer():
        pass
