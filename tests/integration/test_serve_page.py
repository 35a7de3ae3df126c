"""The server's page in a browser: draw, edit, vary, save, by keyboard, and without faults of accessibility."""

import base64
import io
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("openai")

import limner
from chromium import CHROMIUM, Page, open_page
from servers import Server, serve
from tiny import tiny_pipe

AXE = Path(os.environ.get("LIMNER_AXE", "missing"))
STATUS = "document.getElementById('status').textContent"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed")]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    torch.manual_seed(0)
    folder = tiny_pipe().save_pretrained(tmp_path_factory.mktemp("models") / "tiny")
    with serve(folder) as running:
        running.folder = folder
        yield running


@pytest.fixture
def page(server: Server, tmp_path: Path) -> Iterator[Page]:
    with open_page(f"http://127.0.0.1:{server.port}/", tmp_path / "profile") as opened:
        opened.wait(f"{STATUS} === 'Ready.'")
        yield opened
        requests = {e["params"]["request"]["url"] for e in opened.events if e["method"] == "Network.requestWillBeSent"}
        assert all(url.startswith((f"http://127.0.0.1:{server.port}/", "data:", "blob:")) for url in requests)
        assert not [event for event in opened.events if event["method"] == "Runtime.exceptionThrown"]


def draw(page: Page, caption: str, seed: int, n: int = 2) -> None:
    page.evaluate(f"document.getElementById('seed').value = '{seed}', document.getElementById('n').value = '{n}'")
    page.evaluate("document.getElementById('caption').value = '', document.getElementById('caption').focus()")
    page("Input.insertText", text=caption)
    page.press("Enter", "\r")
    page.wait(f"{STATUS}.startsWith('Drew')")


def pictures(page: Page) -> list[np.ndarray]:
    """The pictures of the newest request."""
    sources = page.evaluate("[...document.querySelector('article').querySelectorAll('img')].map((x) => x.src)")
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(x.split(",")[1]))).convert("RGB")) for x in sources]


def saved(drawing) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(drawing.png())).convert("RGB"))


def test_the_page_draws_what_the_library_draws_and_edits_and_varies(server, page):
    pipe = limner.load(server.folder)
    draw(page, "a red circle <&>", 7)
    expected = pipe("a red circle <&>", n=2, candidates=16, seed=7)
    assert all(np.array_equal(a, saved(b)) for a, b in zip(pictures(page), expected, strict=True))
    assert "a red circle <&>" in page.evaluate("document.querySelector('article img').alt")

    page.evaluate("[...document.querySelectorAll('button')].find((x) => x.textContent === 'Vary').click()")
    page.wait("document.querySelectorAll('article').length === 2")
    page.wait(f"{STATUS}.startsWith('Drew')")
    varied = pipe("a red circle <&>", n=2, candidates=16, seed=8)
    assert all(np.array_equal(a, saved(b)) for a, b in zip(pictures(page), varied, strict=True))

    page.evaluate("[...document.querySelectorAll('button')].find((x) => x.textContent === 'Edit').click()")
    page.wait("!document.getElementById('edit').hidden")
    draw(page, "a blue square", 3, 1)
    rows = pipe.prior.config.grid[0] // 2
    edited = pipe("a blue square", candidates=16, seed=3, prompt_tokens=pipe.prime(varied.images[0], rows))[0]
    assert np.array_equal(pictures(page)[0], saved(edited))

    box = page.evaluate(
        "(({ left, top, width }) => [left, top, width])(document.getElementById('mask').getBoundingClientRect())"
    )
    x, y = box[0] + box[2] / 2, box[1] + box[2] / 2
    for kind in ("mousePressed", "mouseReleased"):
        page("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)
    assert page.evaluate("document.getElementById('rows').value") == "0"
    draw(page, "a blue square", 3, 1)
    before, after = saved(varied[0]), pictures(page)[0]
    side = len(before)
    corner = side // 6
    assert np.abs(before[:corner].astype(int) - after[:corner].astype(int)).mean() < 64  # far from the paint


UPLOAD = """{
  const bytes = Uint8Array.from(atob("%s"), (c) => c.charCodeAt(0)), files = new DataTransfer();
  files.items.add(new File([bytes], "icon", { type: "%s" }));
  document.getElementById("upload").files = files.files;
  document.getElementById("upload").dispatchEvent(new Event("change"));
}"""


def upload(page: Page, data: bytes, kind: str) -> None:
    page.evaluate(UPLOAD % (base64.b64encode(data).decode(), kind))


def test_a_picture_of_the_disk_is_followed(tmp_path):
    torch.manual_seed(0)
    folder = tiny_pipe(condition_blocks=1).save_pretrained(tmp_path / "tiny")
    picture = Image.effect_noise((384, 384), 99).convert("RGB")
    file = io.BytesIO()
    picture.save(file, "PNG")
    with serve(folder) as server, open_page(f"http://127.0.0.1:{server.port}/", tmp_path / "profile") as page:
        page.wait(f"{STATUS} === 'Ready.'")
        pipe = limner.load(folder)
        upload(page, file.getvalue(), "image/png")
        page.wait("!document.getElementById('edit').hidden")
        assert not page.evaluate("document.getElementById('follow-row').hidden")
        draw(page, "a blue square", 3)
        expected = pipe("a blue square", n=2, candidates=16, seed=3, prompt_tokens=pipe.like(picture))
        assert all(np.array_equal(a, saved(b)) for a, b in zip(pictures(page), expected, strict=True))
        page.evaluate("document.getElementById('follow').click()")  # now the lower half is drawn
        draw(page, "a blue square", 3)
        half = pipe.prime(picture, pipe.prior.config.grid[0] // 2)
        expected = pipe("a blue square", n=2, candidates=16, seed=3, prompt_tokens=half)
        assert all(np.array_equal(a, saved(b)) for a, b in zip(pictures(page), expected, strict=True))
        svg = b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 2 1"><rect width="1" height="1" fill="red"/></svg>'
        upload(page, svg, "image/svg+xml")
        page.wait("edited && edited.painted.length === 0 && edited.image.naturalWidth === 384")
        upload(page, b"no picture", "image/png")
        page.wait("document.getElementById('error').textContent.includes('is not a picture')")


def test_errors_are_shown_and_announced(server, page):
    page.evaluate(
        "document.getElementById('caption').value = 'a', document.getElementById('model').innerHTML = '<option>x'"
    )
    page.evaluate("document.getElementById('form').requestSubmit()")
    page.wait("!document.getElementById('error').hidden")
    assert "does not exist" in page.evaluate("document.querySelector('[role=alert]').textContent")
    assert page.evaluate("document.querySelectorAll('article').length") == 0
    page.evaluate("document.getElementById('caption').value = ' '")
    page.evaluate("document.getElementById('form').requestSubmit()")
    page.wait("document.getElementById('error').textContent.startsWith('The caption is empty')")


def test_a_server_that_ends_is_an_error(server, tmp_path):
    with serve(server.folder) as ending, open_page(f"http://127.0.0.1:{ending.port}/", tmp_path / "profile") as page:
        page.wait(f"{STATUS} === 'Ready.'")
        ending.process.kill()
        page.evaluate("document.getElementById('caption').value = 'a'")
        page.evaluate("document.getElementById('form').requestSubmit()")
        page.wait("document.getElementById('error').textContent.startsWith('The connection ended')")
        assert page.evaluate("document.querySelectorAll('article').length") == 0


@pytest.mark.skipif(not AXE.exists(), reason="LIMNER_AXE does not name axe.min.js of the npm package axe-core")
@pytest.mark.parametrize("width", [390, 1280])
def test_axe_finds_no_fault(server, page, width):
    page("Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=width < 500)
    draw(page, "a red circle", 7)
    page.evaluate("[...document.querySelectorAll('button')].find((x) => x.textContent === 'Edit').click()")
    page.wait("!document.getElementById('edit').hidden")
    page.evaluate(AXE.read_text("utf-8") + "\n; true")
    found = page.evaluate("axe.run().then((x) => x.violations.map((y) => [y.id, y.nodes.map((z) => z.html)]))")
    assert found == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
