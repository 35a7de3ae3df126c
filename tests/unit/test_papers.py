"""The table of the papers' claims, docs/papers.toml: files, names, commands and reasons exist; the page equals it."""

import ast
import contextlib
import io
import re
import runpy
import shlex
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import tyro

import limner.cli
from limner.experiments import EXPERIMENTS

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "docs/papers.py"))
CLAIMS = SCRIPT["claims"]()
COMMANDS = sorted({row.command for row in CLAIMS if row.command})


class _Parsed(Exception):
    """Raised instead of running a command whose arguments are valid."""


@cache
def definitions(path: Path) -> frozenset[str]:
    """Dotted names that a Python file defines: functions, classes, variables, and attributes of classes."""
    return frozenset(_names(ast.parse(path.read_text("utf-8")), ""))


def _names(node: ast.AST, prefix: str):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield prefix + child.name
            if isinstance(child, ast.ClassDef):
                yield from _names(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            for target in child.targets if isinstance(child, ast.Assign) else [child.target]:
                yield from (prefix + name.id for name in ast.walk(target) if isinstance(name, ast.Name))


def is_named(path: Path, name: str) -> bool:
    """Return True if a Python file defines the name, or another file contains it as a word."""
    if path.suffix == ".py":
        return name in definitions(path)
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", path.read_text("utf-8")) is not None


def check_command(line: str) -> None:
    """Parse a command line of `limner`, also behind torchrun, without running it. Raises `AssertionError`."""
    words = shlex.split(line)
    if words[0] == "torchrun":
        at = words.index("-m")
        assert words[at + 1] == "limner", line
        words = words[at + 1 :]
    assert words[0] == "limner" and words[1] in limner.cli.COMMANDS, line
    parse = tyro.cli

    def parse_only(*args, **options):
        raise _Parsed(parse(*args, **options))

    printed = io.StringIO()
    with patch.object(tyro, "cli", parse_only), contextlib.redirect_stderr(printed):
        try:
            limner.cli.main(words[1:])
        except _Parsed as parsed:
            options = parsed.args[0]
        else:
            raise AssertionError(f"{line}: {printed.getvalue()}")
    assert words[1] != "reproduce" or options.name in EXPERIMENTS, line


def test_the_table_has_all_claims():
    assert len(CLAIMS) == 353
    papers = {paper: sum(row.paper == paper for row in CLAIMS) for paper in ("dalle", "switchback", "pytorch")}
    assert papers == {"dalle": 162, "switchback": 79, "pytorch": 112}
    assert len({(row.paper, row.id) for row in CLAIMS}) == len(CLAIMS)


def test_each_claim_has_a_section_a_status_and_a_reason_unless_it_works():
    for row in CLAIMS:
        assert row.section and row.claim and re.fullmatch(r"[a-z0-9-]+", row.id), row
        assert row.status in SCRIPT["STATUSES"], row
        assert row.reason or row.status == "works", row
        assert row.where or row.status in ("missing", "not applicable"), row


def test_each_file_exists_and_defines_the_name():
    places = [(row.id, path, name) for row in CLAIMS for path, name in row.where]
    absent = [place for place in places if not (ROOT / place[1]).is_file()]
    assert absent == []
    assert [place for place in places if place[2] and not is_named(ROOT / place[1], place[2])] == []
    assert len(places) > 300


@pytest.mark.parametrize("line", COMMANDS)
def test_each_command_is_one_of_limner(line):
    check_command(line)


def test_the_table_names_commands():
    assert len(COMMANDS) > 50


@pytest.mark.parametrize(
    "line",
    [
        "limner paint CAPTION",
        "limner inspect underflows RUN DATA",
        "limner reproduce fixed-p",
        "limner draw CAPTION --candidate-count 4",
        "limner train DATA --recipe dalle-13b --out RUN",
        "limner train DATA --recipe dalle-12b --out RUN --prior.training.precision fp17weights",
        "torchrun -m limner2 train DATA",
    ],
)
def test_a_wrong_command_is_found(line):
    with pytest.raises(AssertionError):
        check_command(line)


def test_a_name_must_be_defined_not_only_mentioned():
    path = ROOT / "src/limner/models/dvae.py"
    assert is_named(path, "DVAE.tokenize") and is_named(path, "DVAEConfig.vocab") and is_named(path, "EPSILON")
    assert not is_named(path, "tokenize") and not is_named(path, "PatchEncoder") and not is_named(path, "DVAE.vocab")


def test_the_page_is_that_of_the_table():
    written = (ROOT / "docs/concepts/papers.md").read_text("utf-8")
    assert written == SCRIPT["page"](), "write it again: python docs/papers.py"
    status = r"(?:works|works: .+|partial: .+|missing: .+|not applicable: .+)"
    rows = re.findall(rf"^\| [^|]+ \| [^|]+ \| [^|]* \| {status} \| [^|]* \|$", written, re.MULTILINE)
    assert len(rows) == len(CLAIMS)
