"""SVG rendered in a child process: the same pixels, and limits on time and memory."""

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from limner.data.sample import Rejected
from limner.errors import UserError
from limner.tasks.svg import document, draw
from limner.tasks.svg_renderer import SVGRenderer

BOX = (0.0, 0.0, 8.0, 8.0)
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
