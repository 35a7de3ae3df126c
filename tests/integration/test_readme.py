"""The commands and programs of README and guides, word by word, in their order and in one folder.

Smaller sizes are appended to long commands. Commands that need a network or the machine's package manager are not run,
and neither is `pytest`. Commands within sentences of the README are run here or by the file that `WITHIN` names.
"""

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from icon_sets import archive, information
from limner.errors import UserError
from limner.tasks import emoji
from pages import ROOT, add_programs, shell, steps

GUIDES = ("draw", "edit", "train", "emoji-and-icons", "continue", "evaluate", "own-model")  # scale: test_scale.py
PAGES = ["README.md", *(f"docs/guides/{name}.md" for name in GUIDES), "docs/reference/metrics.md"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINES = list(dict.fromkeys(step for page in PAGES for step in steps(page)))

_LIKE = {"model.width": 32, "model.depth": 2, "model.heads": 2, "training.steps": 2, "training.batch-size": 4}
_SMALL = {
    "--dvae.model.width": 8, "--dvae.model.vocab": 64, "--dvae.training.steps": 2, "--dvae.training.batch-size": 4,
    **{f"--{stage}.{name}": value for stage in ("prior", "contrastive") for name, value in _LIKE.items()},
}  # fmt: skip
APPENDED = {  # to a command that begins so
    "limner train": " ".join(f"{name} {value}" for name, value in _SMALL.items()),
    "limner bench --grids": "--size tiny --rounds 1 --batch 0 --grids 8 --candidates 1 4",
    "limner bench": "--size tiny --rounds 1 --batch 1 --grids 8 --candidates 1 4",
    "limner draw": "--candidates 4",
    "limner edit --like": "--candidates 4",
    "limner evaluate emoji": "--captions 4 --candidates 2 --repeats 1",
    "limner evaluate icons": "--captions 2 --candidates 2 --classifier-steps 1",
    "limner evaluate glyphs": "--captions 2 --candidates 2 --classifier-steps 1",
    "limner evaluate grid": "--candidates 2",
    "limner evaluate all": "--captions 8 --candidates 2",
    "limner evaluate fidelity": "--captions 30",
    "limner evaluate composition": "--captions 2 --candidates 2",
    "limner evaluate reconstruction scenes": "--count 32",
}
HERE, CI = "tests/integration/test_readme.py", ".ci/run"
WITHIN = {  # commands within sentences of the README, and the file that runs them
    'pip install ".[torch,data,plot]"': CI,  # as part of the set `dev`
    'pip install ".[docs]" && mkdocs build --strict': CI,
    'limner edit --like ICON.svg "the same, filled" --model glyphs': "tests/integration/test_bundled.py",
}
NOT_RUN = ("pip install", "apt-get install", "npm pack")
DEMO = """
from dataclasses import replace
from limner.cli import demo
from limner.recipes import presets
def small(stage):
    training = replace(stage.training, steps=4, batch_size=4)
    return replace(stage, model=replace(stage.model, width=32, depth=1, heads=2), training=training)
recipe = presets.demo()
recipe = replace(recipe, prior=small(recipe.prior), contrastive=small(recipe.contrastive))
demo.Demo.recipe = lambda self: recipe
from limner.cli import main
raise SystemExit(main(["demo", "--scenes", "60", "--captions", "2", "--candidates", "3", "--evaluated", "2"]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A reader's folder: `limner` and `python` on the path, and `photos/` with captions."""
    here = tmp_path_factory.mktemp("readme")
    add_programs(here)
    photos, random = here / "photos", np.random.default_rng(0)
    photos.mkdir()
    for i in range(60):
        rows = np.linspace(*random.integers(0, 256, (2, 3)), 160).astype(np.uint8)
        Image.fromarray(np.repeat(rows[:, None], 160, 1)).save(photos / f"{i}.png")
        (photos / f"{i}.txt").write_text(f"the sky on a sofa, photographed with camera number {i}")
    _icon_sets(here, random)
    _glyph_sets(here)
    return here


def _icon_sets(here: Path, random: np.random.Generator) -> None:
    """The eight archives that `npm pack` would write, with other drawings."""
    pytest.importorskip("emoji")
    names = [one.name.replace(" ", "-") for one in emoji.all_emoji() if not one.tones][:80]
    (packed,) = (line for _, line in LINES if line.startswith("npm pack") and "{" in line)
    (drawn,) = (shlex.split(line) for _, line in LINES if line.startswith("limner data icons"))
    asked = drawn[drawn.index("--categories") + 1 :]
    for prefix in re.search(r"{(.*)}", packed)[1].split(","):  # pyright: ignore[reportOptionalSubscript]
        colors = random.integers(0, 1 << 24, len(names))
        icons = {
            name: {"body": f'<path fill="#{color:06x}" d="M{k % 7} 1h8v{k % 11 + 3}H{k % 5}z"/>'}
            for k, (name, color) in enumerate(zip(names, colors, strict=True))
        }
        archive(
            here / f"iconify-json-{prefix}-1.0.0.tgz",
            icons={"prefix": prefix, "icons": icons},
            info=information("MIT"),
            metadata={"categories": {category: names[i :: len(asked)] for i, category in enumerate(asked)}},
        )


def _glyph_sets(here: Path) -> None:
    """An archive of twelve sets, as `npm pack @iconify/json` would write it, of black bars."""
    sets = {}
    for i in range(12):
        icons = {
            f"thing-{k}": {"body": f'<path fill="currentColor" d="M{k % 8} {k // 8}h8v{i + 1}h-8z"/>'}
            for k in range(64)
        }
        info = {"name": f"Set {i}", "author": {"name": "A. Painter"}, "license": {"spdx": "MIT"}}
        sets[f"json__set-{i}"] = {"prefix": f"set-{i}", "info": info, "icons": icons}
    archive(here / "iconify-json-2.0.0.tgz", **sets)
    svg = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24"><path d="M12 2l4 18h-8z"/></svg>'
    (here / "rocket.svg").write_text(svg)


def command(line: str) -> str:
    """The line without its comment, with smaller sizes where it would take long."""
    more = next((more for begin, more in APPENDED.items() if line.startswith(begin)), "")
    return f"{line} {more}" + " --prior.training.cooldown-steps 1" * ("cooldown-steps" in line)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "line"), LINES, ids=[line.split("  ")[0][:50].strip() for _, line in LINES])
def test_a_command_does_what_the_page_says(kind: str, line: str, folder: Path) -> None:
    if kind == "python":
        program = folder / "program.py"
        program.write_text(line)
        shell("python program.py", folder)
        assert all((folder / name).exists() for name in re.findall(r'save\("(.+?)"\)', line))
    elif line == "limner demo":
        (folder / "demo.py").write_text(DEMO)
        shell("python demo.py", folder)
        assert (folder / "limner-demo/report.html").exists()
        assert (folder / "limner-demo/contact.png").exists()
    elif line.startswith(NOT_RUN):
        pytest.skip("installs")
    elif "emoji" in line and not emoji_are_there():
        pytest.skip("needs a color-emoji font and the package emoji")
    else:
        output = shell(command(line), folder).stdout
        if " -o " in line or " --plot " in line or " --mosaic " in line:
            assert list(folder.glob("*.png"))
        assert output or line.startswith("python -c")


def emoji_are_there() -> bool:
    try:
        return bool(emoji.find_font() and emoji.all_emoji())
    except UserError:
        return False


def test_the_pages_have_commands_and_programs() -> None:
    assert {kind for kind, _ in LINES} == {"sh", "python"}
    assert len(LINES) > 30


def test_the_readme_is_short_and_begins_with_a_picture_a_command_and_a_comparison() -> None:
    lines = README.splitlines()
    assert len(lines) <= 120 and max(map(len, lines)) <= 130
    screen = "\n".join(lines[:25])
    assert all(part in screen for part in ("docs/images/glyphs.png", "`limner draw ", "| dalle-pytorch"))


def test_commands_within_sentences_are_run_by_the_file_named() -> None:
    prose = re.sub(r"^```.*?^```", "", README, flags=re.M | re.S).replace("\n", " ")
    named = re.findall(r"`((?:limner|torchrun|python|pip|pytest|ruff|pyright|mkdocs|\.ci/run) [^`]*)`", prose)
    assert {name for name in named if not any(line.startswith(name) for _, line in LINES)} == WITHIN.keys()
    assert all((ROOT / where).exists() for where in WITHIN.values() if where)


def test_help_lists_the_settings_of_a_recipe(folder: Path) -> None:
    assert "--prior.training.steps" in shell("limner train --recipe laptop --help", folder).stdout


def test_golden_curves_are_written_again(folder: Path) -> None:
    shutil.copytree(ROOT / "tests/golden", folder / "tests/golden")
    written = folder / "tests/golden/curves.json"
    before = written.stat().st_mtime_ns, json.loads(written.read_text())
    shell("python tests/golden/make.py contrastive", folder)
    assert written.stat().st_mtime_ns > before[0]
    assert json.loads(written.read_text()).keys() == before[1].keys()
