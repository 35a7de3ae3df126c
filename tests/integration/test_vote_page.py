"""The page of `limner vote` in a browser: keyboard and mouse, stopped and continued, then the tables of its votes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("openai")

from chromium import CHROMIUM, Page, open_page
from servers import ROOT, running

AXE = Path(os.environ.get("LIMNER_AXE", "missing"))
STATUS = "document.getElementById('status').textContent"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    root = tmp_path_factory.mktemp("pictures")
    for m, model in enumerate(("bright", "dark")):
        (root / model).mkdir()
        for i in range(3):
            noise = np.random.default_rng(i).integers(128, size=(24, 24, 3), dtype=np.uint8) + 127 * (1 - m)
            Image.fromarray(noise.astype(np.uint8)).save(root / model / f"a-red-circle-{i}.png")
    return [str(root / "bright"), str(root / "dark")]


def begin(page: Page, name: str) -> None:
    page.evaluate(f"document.getElementById('voter').value = {json.dumps(name)}")
    page.evaluate("document.getElementById('start').requestSubmit()")
    wait_for_pictures(page)


def wait_for_pictures(page: Page) -> None:
    page.wait(f"asked !== null || {STATUS}.startsWith('Thank')")


def brighter(page: Page) -> str:
    """Return the side whose picture is brighter, as a person sees it: "left", "right", or "" if both are equal."""
    measure = """[...document.querySelectorAll('#pair img')].map((image) => {
      const canvas = Object.assign(document.createElement('canvas'), { width: 24, height: 24 });
      const context = canvas.getContext('2d');
      context.drawImage(image, 0, 0, 24, 24);
      return context.getImageData(0, 0, 24, 24).data.reduce((sum, x) => sum + x, 0) / (4 * 24 * 24);
    })"""
    left, right = page.evaluate(measure)
    return "" if abs(left - right) < 20 else "left" if left > right else "right"


@pytest.fixture(scope="module")
def voted(folders, tmp_path_factory) -> Path:
    """Votes of two people that like bright pictures, one by keyboard, one by mouse."""
    votes = tmp_path_factory.mktemp("votes") / "votes.sqlite"
    with running("vote", *folders, "--votes", str(votes), "--port", "0") as server:
        address = f"http://127.0.0.1:{server.port}/"
        for name in ("Anna", "Ben"):
            for part in range(2):  # the page is closed after three votes and opened again
                with open_page(address, votes.parent / f"profile-{name}-{part}") as page:
                    begin(page, name)
                    for _ in range(100 if part else 3):
                        if page.evaluate("asked === null"):
                            break
                        side = brighter(page)
                        if name == "Anna":
                            page.press({"left": "1", "right": "2", "": "0"}[side])
                        else:
                            page.evaluate(f"document.getElementById('{side or 'equal'}').click()")
                        wait_for_pictures(page)
                    thanked = page.evaluate(STATUS).startswith("Thank you. You have compared 4 pairs")
                    assert thanked == bool(part)
                    assert not [event for event in page.events if event["method"] == "Runtime.exceptionThrown"]
    return votes


def test_the_tables_show_what_the_voters_saw(voted, tmp_path):
    command = [sys.executable, "-m", "limner", "evaluate", "votes", str(voted), "-o", str(tmp_path / "votes.json")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "votes.json").read_text())["results"]
    for question in ("realism", "caption"):
        row = results[0]["rows"][f"{question}: bright over dark"]
        assert (row["won"]["value"], row["won"]["total"], row["votes"]["value"]) == (1.0, 3, 6)
    assert {"Anna", "Ben"} == {name.split(" (")[0] for name in results[-1]["rows"]}


@pytest.mark.skipif(not AXE.exists(), reason="LIMNER_AXE does not name axe.min.js of the npm package axe-core")
@pytest.mark.parametrize("width", [390, 1280])
def test_axe_finds_no_fault(folders, tmp_path, width):
    with running("vote", *folders, "--votes", str(tmp_path / "votes.sqlite"), "--port", "0") as server:
        address = f"http://127.0.0.1:{server.port}/"
        with open_page(address, tmp_path / "profile") as page:
            page("Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=width < 500)
            for step in range(2):
                if step:
                    begin(page, "Anna")
                page.evaluate(AXE.read_text("utf-8") + "\n; true")
                found = page.evaluate(
                    "axe.run().then((x) => x.violations.map((y) => [y.id, y.nodes.map((z) => z.html)]))"
                )
                assert found == []
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
