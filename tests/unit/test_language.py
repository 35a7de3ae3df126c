"""The language of what users read, and the check itself."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
import language

ROOT = Path(__file__).parents[2]


def test_readme_docs_docstrings_help_and_errors_keep_the_rules():
    paths = [
        ROOT / name
        for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs", "src/limner", "examples", "bench")
    ]
    findings, sentences = language.read(paths)
    print(f"{sentences:,} sentences")
    assert sentences > 5_000
    assert findings == [], "\n".join(map(str, findings))


def test_docstrings_and_comments_of_tests_keep_the_rules():
    """Strings of tests are data: they hold the words that the check looks for."""
    findings, sentences = language.read([ROOT / "tests"], ("docstring", "comment"))
    assert sentences > 1_000
    assert findings == [], "\n".join(map(str, findings))


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ('def f():\n    """Of this process; 0 where there is one."""', "opening"),
        ('def f():\n    """Whether it is true on one rank."""', "opening"),
        ('raise ValueError("the run goes on with other factors")', "private word"),
        ("x = 1  # what an optimiser would lose", "British spelling"),
        ('class A:\n    b: int = 0\n    """A folder that is no run."""', "negation as predicate"),
        ('print(f"{x} is no longer read here")', "history"),
    ],
)
def test_the_check_finds_what_it_is_for(tmp_path, source, rule):
    path = tmp_path / "module.py"
    path.write_text(f'"""A module."""\n{source}\n')
    findings, _ = language.read([path])
    assert rule in [finding.rule for finding in findings]


def test_code_and_plain_sentences_are_left_alone(tmp_path):
    (tmp_path / "page.md").write_text("# Title\n\nReturn the rank. `oracle` is a name.\n\n```sh\nlimner anew\n```\n")
    assert language.read([tmp_path]) == ([], 2)
