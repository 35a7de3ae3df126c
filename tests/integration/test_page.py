"""The exported page draws in a browser, without a network, what `limner.load()` draws in fp32."""

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from chromium import CHROMIUM, Page, open_page
from limner import load
from limner.errors import UserError
from limner.export.page import GLUE, WASM, read_web
from limner.numerics.precision import Fp32
from limner.retrieval import Examples
from limner.sampling.generation_config import Sampler

ROOT = Path(__file__).parents[2]
WEB = Path(os.environ.get("LIMNER_ONNXRUNTIME_WEB", "missing"))
CAPTIONS = {
    "scenes": [
        f"a {size} {color} {shape} on a {background} background"
        for size, color in zip(["small", "large"] * 4, ["red", "green", "blue", "yellow"] * 2, strict=True)
        for shape, background in [("circle", "white"), ("striped square", "black")]
    ],
    "icons": ["a tiger, flat", "a hamburger, line drawing", "a grinning face, 3d", "a red heart, simple"],
    "glyphs": ["an ambulance, lucide", "sun, bold", "a rocket", "house; phosphor thin", "no such subject"],
}
TEXTS = [
    " A  large\tRED\nCircle ",
    "it's 12½ o'clock, they'll…",
    "ΟΔΟΣ İ e\u0301 ﬁ 東京 🦊👩‍🔬",
    "\ufeffx\u00a0y\u0085z\u3000",
    "__proto__",
]
DRAW = """(async () => {
  const drawn = [];
  for (const [caption, seed, count, settings] of %s) {
    const { text, drawings } = await limner.draw(caption, seed, count, settings);
    drawn.push([text, drawings.map(({ tokens }) => tokens), drawings.map(({ score }) => score)]);
  }
  return drawn;
})()"""

FOLLOWED = "(caption) => examples.about(caption)"


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed")
@pytest.mark.skipif(not WEB.exists(), reason="LIMNER_ONNXRUNTIME_WEB does not name the npm package onnxruntime-web")
@pytest.mark.parametrize("name", CAPTIONS)
def test_a_page_draws_what_torch_draws(name: str, tmp_path: Path) -> None:
    file, downloads, pipe = tmp_path / "page.html", tmp_path / "downloads", load(name, precision=Fp32())
    export = ["export", name, "--to", "page", "-o", file, "--onnxruntime-web", WEB]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-m", "limner", *map(str, export)], env=environment, check=True)
    assert file.stat().st_size < 20e6
    with open_page(file, tmp_path / "profile") as page:
        page.wait("document.getElementById('status').textContent.startsWith('Ready')")

        ids = page.evaluate(f"model().then(({{ tokenizer }}) => {json.dumps(TEXTS)}.map((x) => tokenizer.encode(x)))")
        assert ids == [[i for i in row if i >= 0] for row in pipe.tokenizer.encode_array(TEXTS).tolist()]

        captions = _captions(pipe.examples)
        followed = page.evaluate(f"model().then(({{ examples }}) => {json.dumps(captions)}.map({FOLLOWED}))")
        assert followed == [pipe.examples.about(x).tolist() if pipe.examples else [] for x in captions]

        draws = [(caption, seed, 1, {}) for seed, caption in enumerate(CAPTIONS[name])]
        draws += [(CAPTIONS[name][0], 2**40 + 1, 3, {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "guidance": 1.5})]
        drawn = page.evaluate(DRAW % json.dumps(draws))
        for (caption, seed, count, settings), (text, tokens, scores) in zip(draws, drawn, strict=True):
            assert text == pipe.tokenizer.encode([caption], pipe.prior.config.text_len)[0].tolist()
            expected = pipe.candidates([caption], count, seed=seed, sampler=Sampler(**settings))
            assert tokens == expected.tokens[0].tolist(), caption
            assert scores == pytest.approx(expected.scores[0].tolist(), abs=1e-4)

        page("Page.setDownloadBehavior", behavior="allow", downloadPath=str(downloads))
        caption = f"{CAPTIONS[name][1]} <é> & 東"
        page.evaluate("document.getElementById('seed').value = '7', document.getElementById('candidates').value = '2'")
        page.evaluate("document.getElementById('caption').focus()")
        page("Input.insertText", text=caption)
        page.press("Enter", "\r")
        page.wait("document.getElementById('status').textContent.startsWith('Drew')")
        assert caption in page.evaluate("document.querySelector('#drawings img').alt")
        page.evaluate("document.querySelector('#drawings a').click()")
        downloaded = _downloaded(page, downloads)
        requests = {e["params"]["request"]["url"] for e in page.events if e["method"] == "Network.requestWillBeSent"}
    expected = Image.open(io.BytesIO(pipe(caption, candidates=2, seed=7)[0].png()))
    score, expected_score = float(downloaded.text.pop("score")), float(expected.text.pop("score"))
    assert downloaded.text == expected.text
    assert score == pytest.approx(expected_score, abs=2e-4)
    assert np.abs(np.asarray(downloaded, int) - np.asarray(expected, int)).max() <= 1
    assert all(url == file.as_uri() or url.startswith(("blob:", "data:")) for url in requests), requests


def _captions(examples: Examples | None) -> list[str]:
    """Captions that name one or two subjects and styles of the examples, or none."""
    captions, rng = ["a Rocket", "É, bold", "", ",", "bold, bold, bold"], np.random.default_rng(0)
    if examples:
        for _ in range(50):
            first, second = rng.choice(sorted(set(examples.subjects)), 2)
            style, other = rng.choice(sorted(set(examples.styles)), 2)
            captions += [f"{first}, {style}", f"an {first.upper()} {second}; {style}", f"{style}, {other} {first}"]
    return captions


def _downloaded(page: Page, folder: Path) -> Image.Image:
    for _ in range(300):
        if files := list(folder.glob("*.png")):
            with Image.open(files[0]) as picture:
                picture.load()
                return picture
        page.evaluate("new Promise((resolve) => setTimeout(resolve, 100))")
    raise AssertionError("nothing was downloaded")


def _archive(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def test_only_the_npm_package_is_read(tmp_path: Path) -> None:
    good = {
        "package/package.json": b'{"name": "onnxruntime-web"}',
        f"package/{GLUE}": b"glue",
        f"package/{WASM}": b"wasm",
    }
    files = read_web(_archive(tmp_path / "good.tgz", {**good, "../../elsewhere": b"x", "/etc/other": b"x"}))
    assert files == {"package.json": good["package/package.json"], GLUE: b"glue", WASM: b"wasm"}
    for name in files:
        (tmp_path / "folder" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / name).write_bytes(files[name])
    assert read_web(tmp_path / "folder") == files
    data = (tmp_path / "good.tgz").read_bytes()
    (tmp_path / "cut.tgz").write_bytes(data[: len(data) // 2])
    _archive(tmp_path / "other.tgz", {**good, "package/package.json": b'{"name": "another"}'})
    _archive(tmp_path / "list.tgz", {**good, "package/package.json": b"[]"})
    _archive(tmp_path / "few.tgz", dict(list(good.items())[:2]))
    _archive(tmp_path / "large.tgz", {**good, f"package/{WASM}": bytes((64 << 20) + 1)})
    for path in (None, *(tmp_path / f"{name}.tgz" for name in ("missing", "cut", "other", "list", "few", "large"))):
        with pytest.raises(UserError, match="npm pack onnxruntime-web@"):
            read_web(path)
