"""The documentation site: strict build, links and anchors, no outside resources, a complete reference."""

import contextlib
import importlib
import importlib.util
import inspect
import io
import os
import pkgutil
import re
import subprocess
import sys
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest
import torch

import limner
import limner.cli
from limner.models.contrastive import CLIPConfig
from limner.models.dvae import DVAEConfig
from limner.models.patch_dvae import PatchDVAEConfig
from limner.models.transformer import TransformerConfig
from limner.objectives.autoregressive import Autoregressive
from limner.objectives.codebook_elbo import BalancedELB
from limner.objectives.elbo import RelaxedELB
from limner.objectives.hard_negatives import HardNegativeLoss
from limner.objectives.reconstruction_loss import ReconstructionLoss
from limner.pretrained import list_pretrained
from limner.training.config import TrainConfig
from limner.training.train_state import TrainState

ROOT = Path(__file__).parents[2]
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}  # without a click


class Html(HTMLParser):
    """Anchors of a page, targets of its links, and addresses that a browser loads with it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids |= {value for name in ("id", "name") if (value := found.get(name))}
        if tag == "a" and (href := found.get("href")):
            self.links.append(href)
        if (name := LOADED.get(tag)) and (address := found.get(name)):
            self.loaded.append(address)


def script(name: str) -> ModuleType:
    """A module of docs/."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / f"docs/{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return script("reference")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Html]:
    """Every page of the built site: of the folder `LIMNER_SITE`, or of a strict build."""
    pytest.importorskip("mkdocs")
    folder = Path(os.environ.get("LIMNER_SITE") or tmp_path_factory.mktemp("site"))
    if not (folder / "index.html").exists():
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.resolve(): Html(path.read_text("utf-8")) for path in folder.rglob("*.html")}
    assert len(pages) > 100
    return pages


@pytest.mark.slow
def test_links_and_anchors_of_the_site_exist(site: dict[Path, Html]):
    broken, checked = [], 0
    for path, page in site.items():
        if path.name == "404.html":  # its links are absolute: it is served for any address
            continue
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme or link.startswith("//"):
                continue
            checked += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            if not target.exists() or (anchor and target in site and anchor not in site[target].ids):
                broken.append((path.name, link))
    assert broken == []
    assert checked > 10_000


@pytest.mark.slow
@pytest.mark.skipif("LIMNER_ONNXRUNTIME_WEB" not in os.environ, reason="names no npm package of onnxruntime-web")
def test_the_site_has_a_page_that_draws_for_each_bundled_model(site: dict[Path, Html]):
    sizes = {path.stem: path.stat().st_size for path in site if path.parent.name == "browser"}
    assert sizes.keys() == list_pretrained().keys()
    assert max(sizes.values()) <= 20_000_000


@pytest.mark.slow
def test_the_api_reference_describes_all_public_classes_and_functions(site: dict[Path, Html]):
    anchors = set().union(*(page.ids for path, page in site.items() if path.parent.name == "api"))
    modules = [module.name for module in pkgutil.walk_packages(limner.__path__, "limner.")]
    public = {
        f"{value.__module__}.{value.__name__}"
        for module in map(importlib.import_module, (name for name in modules if not name.endswith("__main__")))
        for value in (getattr(module, name) for name in getattr(module, "__all__", []))
        if inspect.isclass(value) or inspect.isfunction(value)
    }
    assert len(public) > 150
    assert public - anchors == set()


@pytest.mark.slow
def test_no_page_loads_anything_from_another_host(site: dict[Path, Html]):
    outside = {address for page in site.values() for address in page.loaded if urlsplit(address).netloc}
    assert outside == set()


@pytest.mark.slow
def test_the_search_index_has_guides_and_reference_and_no_source(site: dict[Path, Html]):
    (index,) = {path.parent for path in site if path.name == "404.html"}
    text = (index / "search/search_index.js").read_text("utf-8")
    assert all(page in text for page in ("guides/draw.html", "reference/cli.html", "reference/recipes/laptop.html"))
    assert '"location":"source/' not in text


def help_of(*words: str) -> set[str]:
    """Options that `limner WORDS --help` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit, match="0"):
        limner.cli.main([*words, "--help"])
    return set(re.findall(r"(?<![\w-])--?[a-z][\w.-]*", re.sub(r"`[^`]*`", "", printed.getvalue())))


def listed(page: str) -> set[str]:
    """Options in the first column of a page's tables."""
    rows = re.findall(r"^\| (.+?) \|", page, re.MULTILINE)
    return {option for row in rows for option in re.findall(r"`(--?[a-z][\w.-]*)`", row)}


def test_the_command_line_page_has_every_command_and_option(reference: ModuleType):
    page = reference.cli()
    sections = dict(zip(*[iter(re.split(r"^## limner (.+)$", page, flags=re.MULTILINE)[1:])] * 2, strict=True))
    assert {name.split()[0] for name in sections} == set(limner.cli.COMMANDS)
    for name in ("draw", "edit", "plan", "data prepare", "evaluate composition", "inspect underflow"):
        assert help_of(*name.split()) - {"-h", "--help"} <= listed(sections[name]), name


@pytest.mark.parametrize("name", ["laptop", "photos"])
def test_a_recipe_page_has_every_setting(reference: ModuleType, name: str):
    settings = {option for option in help_of("train", "--recipe", name) if re.match(r"--(start|\w+\.)", option)}
    page = reference.recipe_page(name)
    chosen = set(re.findall(r"`(--[\w.-]+)` chooses", page))
    variants = set(reference.recipe_options(name).variants)
    assert settings - variants - {"--grad-compression.rank"} <= listed(page) and len(settings) > 60
    assert chosen <= variants


def test_ranges_are_those_of_the_code(reference: ModuleType):
    page = reference.recipe_page("laptop")
    assert "| `--prior.training.clip-norm` | `1.0` | number, > 0; none |" in page
    assert "| `--text.dropout` | `0.1` | number, ≥ 0, ≤ 1 |" in page


def test_every_logged_metric_is_documented():
    text = (ROOT / "docs/reference/metrics.md").read_text("utf-8")
    documented = set(re.findall(r"`([\w/]+)`", "".join(re.findall(r"^\| (`.+?) \|", text, re.MULTILINE))))
    captions = torch.randint(32, (4, 4), generator=torch.Generator().manual_seed(0))
    pixels = torch.randint(256, (4, 3, 16, 16), dtype=torch.uint8)
    batch = {"pixels": pixels, "text": captions, "image": captions}
    dvae = DVAEConfig(size=16, width=8, groups=2, blocks=1, vocab=16, code_width=8)
    prior = TransformerConfig(text_vocab=32, image_vocab=32, text_len=4, grid=(2, 2), width=16, depth=2, heads=2)
    clip = CLIPConfig(text_vocab=32, text_len=4, size=16, patch=8, width=16, depth=1, heads=2, embedding=8)
    logged = defaultdict(set)
    patches = PatchDVAEConfig(size=16, vocab=16, width=8, blocks=1)
    for config, objective in (
        (dvae, RelaxedELB()), (dvae, BalancedELB()), (patches, ReconstructionLoss()), (prior, Autoregressive()),
        (clip, HardNegativeLoss()),
    ):  # fmt: skip
        run = TrainState(config.build(), objective, TrainConfig(steps=1))
        metrics = objective(run.model, batch, 0, run.generator)[1]
        logged[type(objective).__name__] = set(run.report(metrics))
    assert set().union(*logged.values()) - documented == set()
    assert all(len(keys) > 6 for keys in logged.values())


@pytest.mark.slow
def test_the_memory_page_is_what_limner_plan_calculates(reference: ModuleType):
    written = (ROOT / "docs/reference/memory.md").read_text("utf-8")
    assert written == reference.memory(), "write it again: python docs/reference.py"


def test_benchmarks_state_their_conditions_and_no_targets():
    text = (ROOT / "docs/benchmarks.md").read_text("utf-8")
    assert not re.search(r"\btarget|short of", text, re.IGNORECASE)
    sections = re.split(r"^###? ", text, flags=re.MULTILINE)[1:]
    undated = [s.splitlines()[0] for s in sections if "|---" in s and not re.search(r"2026-\d\d-\d\d", s)]
    assert set(undated) <= {"Prior on a GPU", "Optimizers and 8-bit layers on a GPU"}  # their chapter has the date


def test_the_tables_of_the_benchmarks_are_those_of_the_figures():
    text, tables = (ROOT / "docs/benchmarks.md").read_text("utf-8"), script("benchmark_tables")
    assert tables.page(text) == text, "write them again: python docs/benchmark_tables.py"
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "bench/results").glob("*.json")}
    assert set(re.findall(r"<!-- (bench/\S+) -->", text)) == files and len(files) > 20
    assert len(re.findall(r"^\|---", text, re.MULTILINE)) == len(files)  # no table without figures
    assert tables.cell({"value": -1.5, "format": "{:+.1f} s"}, None) == "−1.5 s"
