"""Pages agree with the code: packages, links, files, names."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(DOCS.rglob("*.md"))
#: Pages that docs/hooks.py generates: test_site.py checks links to them.
GENERATED = re.compile(r"(reference/)?(cli|recipes/[\w-]+|api/\w+)\.md$|(contributing|changelog)\.md$")
#: A rate is "per step", not "a step". A phrase before a verb ("bytes a GPU sends") is not a rate.
RATE = re.compile(
    r"\b(?:[kMGT]?B|ms|nats|millions|[uU]nits|[bB]ytes|[sS]econds|values|numbers|positions|tokens?|pixels|pictures|samples"
    r"|GPUs|resblocks|micro-batches|memory|one|once|twice)[ _]an?[ _](?:second|step|pass|update|micro-batch|sample"
    r"|pixel|picture|candidate|caption|position|token|row|line|word|unit|layer|block|group|side|GPU|rank|replica|process|machine"
    r"|call)\b(?! \w+s\b)"
)
NAMED = re.compile(r"`((?:src|tests|bench|docs|examples)/[\w./-]+|[a-z_]+/[\w/]+\.py)`")


def test_the_packages_are_those_of_the_import_contract():
    built = [set(row) for row in runpy.run_path(str(ROOT / "docs/import_graph.py"))["rows"]()]
    page = (DOCS / "concepts/architecture.md").read_text().partition("\n## ")[0]
    rows = [set(re.findall(r"`(\w+)`", line.split("|")[1])) for line in page.splitlines() if line.startswith("| `")]
    assert rows == [row for row in built if row]
    modules, folders = ((ROOT / "src/limner").glob(pattern) for pattern in ("*.py", "*/__init__.py"))
    here = {path.stem for path in modules} | {path.parent.name for path in folders}
    assert set().union(*rows) == here - {"__init__", "__main__"}


def test_the_import_graph_shows_the_imports():
    drawn = runpy.run_path(str(ROOT / "docs/import_graph.py"))["svg"]()
    assert (ROOT / "docs/images/import_graph.svg").read_text() == drawn, "draw it again: python docs/import_graph.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_files_that_a_page_names_are_there(page: Path):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!http)([^)#\s]+)", text):
        assert (page.parent / target).exists() or GENERATED.search(target), target
    if page.name != "LOG.md" and page.parent.name != "log":  # which name files of their time
        for name in NAMED.findall(text):
            assert (ROOT / name).exists() or (ROOT / "src/limner" / name).exists(), name


def test_a_name_after_a_file_is_in_that_file():
    for page in (DOCS / "concepts/papers.md", DOCS / "concepts/method.md", ROOT / "README.md"):
        for line in page.read_text(encoding="utf-8").splitlines():
            for target, names in re.findall(r"\]\(([\w./]+\.py)\)(?::| )? ?((?:`[\w.]+`(?:, )?)+)", line):
                source = (page.parent / target).read_text(encoding="utf-8")
                for name in re.findall(r"`([\w.]+)`", names):
                    assert all(re.search(rf"\b{part}\b", source) for part in name.split(".")), (target, name)


def test_each_round_of_the_log_stands_in_its_contents_and_begins_with_what_was_taken():
    log = (ROOT / "docs/LOG.md").read_text(encoding="utf-8")
    rounds = re.findall(r"^# (.+)\n\n(.*)", log, re.MULTILINE)[1:]  # behind the title
    assert len(rounds) == len(re.findall(r"^# ", log, re.MULTILINE)) - 1 > 0
    contents = re.findall(r"^- \[(.+)\]\(#(.+)\)$", log.partition("\n# ")[0], re.MULTILINE)
    anchors = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title, _ in rounds]
    assert contents == list(zip([title for title, _ in rounds], anchors, strict=True))
    assert [title for title, first in rounds if not first.startswith("Taken: ")] == []


def test_a_rate_is_per_something():
    """The log and the findings keep the words of their time."""
    pages = [page for page in PAGES if page.name not in ("LOG.md", "findings.md") and page.parent.name != "log"]
    sources = [
        path for folder in ("src", "bench", "examples", "docs") for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    for path in [*sources, *pages]:
        assert RATE.findall(path.read_text(encoding="utf-8")) == [], path
    assert RATE.search("3 ms a step") and RATE.search("seconds_a_step") and RATE.search("GB a GPU, in all")
