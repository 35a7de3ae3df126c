"""Pages agree with the code: packages, links, files, names."""

import re
import runpy
from pathlib import Path

import pytest

from limner.experiments import EXPERIMENTS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LOG = DOCS / "log"
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


@pytest.mark.parametrize("name", ["import_graph", "patterns"])
def test_drawings_show_the_code(name: str):
    drawn = runpy.run_path(str(ROOT / f"docs/{name}.py"))["svg"]()
    shown = (ROOT / f"docs/images/{name}.svg").read_text(encoding="utf-8")
    assert shown == drawn, f"draw it again: python docs/{name}.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_files_that_a_page_names_are_there(page: Path):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!http)([^)#\s]+)", text):
        assert (page.parent / target).exists() or GENERATED.search(target), target
    if page.parent != LOG:  # an entry has the names of its date
        for name in NAMED.findall(text):
            assert (ROOT / name).exists() or (ROOT / "src/limner" / name).exists(), name


def test_a_name_after_a_file_is_in_that_file():
    for page in (DOCS / "concepts/papers.md", DOCS / "concepts/method.md", ROOT / "README.md"):
        for line in page.read_text(encoding="utf-8").splitlines():
            for target, names in re.findall(r"\]\(([\w./]+\.py)\)(?::| )? ?((?:`[\w.]+`(?:, )?)+)", line):
                source = (page.parent / target).read_text(encoding="utf-8")
                for name in re.findall(r"`([\w.]+)`", names):
                    assert all(re.search(rf"\b{part}\b", source) for part in name.split(".")), (target, name)


@pytest.mark.parametrize("page", sorted(LOG.glob("[0-9]*.md")), ids=lambda page: page.name)
def test_each_log_entry_has_a_date_a_verdict_and_an_insight(page: Path):
    text = page.read_text(encoding="utf-8")
    entries = [entry for entry in log_entries() if entry.path == page]
    assert len(entries) == len(re.findall(r"^## ", text, re.MULTILINE)) > 0
    assert {entry.date for entry in entries} == {page.stem}
    for body in re.split(r"^## .*$", text, flags=re.MULTILINE)[1:]:
        assert body.strip().split("\n\n")[-1].startswith("Insight: "), body.strip()[:80]


def test_the_contents_of_the_log_list_each_entry_once():
    contents = runpy.run_path(str(ROOT / "docs/log_index.py"))["table"]()
    assert (LOG / "index.md").read_text(encoding="utf-8").endswith("\n" + contents), "run python docs/log_index.py"
    anchors = [entry.anchor for entry in log_entries()]
    assert len(anchors) == len(set(anchors))
    assert not [
        anchor for anchor in anchors if "--" in anchor or not anchor.isascii()
    ]  # GitHub and mkdocs differ there


def log_entries() -> list:
    return runpy.run_path(str(ROOT / "docs/log_index.py"))["entries"]()


def log_references(text: str) -> list[tuple[str, str]]:
    """File names in `docs/log/` with the title quoted after each, "" without one."""
    references = re.findall(r'docs/log/([\w-]+\.md)(?:,[\s#:]+"([^"]+)")?', text)
    return [(name, re.sub(r"[\s#:]*\n[\s#:]*", " ", title)) for name, title in references if name != "index.md"]


def test_references_to_the_log_name_an_entry():
    """A reference is `docs/log/FILE.md, "TOPIC"`, where TOPIC is the beginning of one entry's topic in that file."""
    folders = ("src", "bench", "examples", "tests")
    sources = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")) if path != Path(__file__)]
    entries, checked = log_entries(), 0
    for path in [*PAGES, *sources]:
        text = path.read_text(encoding="utf-8")
        for name, topic in log_references(text):
            matching = [e for e in entries if e.path.name == name and topic and e.topic.startswith(topic)]
            assert len(matching) == 1, (path, name, topic)
            checked += 1
    assert checked > 0


@pytest.mark.parametrize(
    ("text", "references"),
    [
        ('see docs/log/2026-11-21.md, "A title" (x)', [("2026-11-21.md", "A title")]),
        ('#: The best (docs/log/2026-11-21.md,\n#: "A\n#: title")', [("2026-11-21.md", "A title")]),
        ("docs/log/2026-11-21.md has it", [("2026-11-21.md", "")]),
        ("docs/log/index.md lists all", []),
    ],
)
def test_the_topic_of_a_reference_may_be_wrapped(text: str, references: list[tuple[str, str]]):
    assert log_references(text) == references


def test_a_rate_is_per_something():
    """The findings keep the words of their time."""
    pages = [page for page in PAGES if page.name != "findings.md"]
    sources = [
        path for folder in ("src", "bench", "examples", "docs") for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    for path in [*sources, *pages]:
        assert RATE.findall(path.read_text(encoding="utf-8")) == [], path
    assert RATE.search("3 ms a step") and RATE.search("seconds_a_step") and RATE.search("GB a GPU, in all")


def test_the_readme_counts_the_claims_that_can_be_repeated():
    (count,) = re.findall(r"`limner reproduce` repeats (\d+) claims", (ROOT / "README.md").read_text("utf-8"))
    assert int(count) == len(EXPERIMENTS)
