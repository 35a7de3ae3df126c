"""Packages are declared where a file imports them, and nowhere else."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = {
    "c2pa_python": "c2pa",
    "pillow": "PIL",
    "pytest_xdist": "xdist",
    "attrs": "attr",
    "pyyaml": "yaml",
    "torch_optimi": "optimi",
    "mkdocs_material": "material",
}  # where the name differs
# Commands, plugins, and a requirement of a package that the tests import: no file imports them.
CALLED = {"ruff", "schemathesis", "pyright", "import_linter", "xdist", "attr", "material", "mkdocstrings"}
# bench/peers.py and tests/reference: the sources of others, by their path.
ABSENT = {"autoregressive", "dalle_pytorch", "torchvision"}


def imported(*folders: str) -> set[str]:
    """Top modules of other people that the files under `folders` import."""
    found = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                found.add(node.module.partition(".")[0])
    own = {"limner"} | {
        path.stem
        for path in (*(ROOT / "tests").rglob("*"), *(ROOT / "bench").rglob("*.py"), *(ROOT / "docs").iterdir())
    }
    return found - own - sys.stdlib_module_names - ABSENT


def modules(requirements: Iterable[str]) -> set[str]:
    names = [re.match(r"[\w.-]+", text).group().lower().replace("-", "_") for text in requirements]
    return {MODULES.get(name, name) for name in names} - {"limner"}


def test_declared_and_imported_packages_are_equal():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    core, extras = modules(project["dependencies"]), project["optional-dependencies"]
    work = modules(extras.pop("docs") + extras.pop("dev"))
    optional = modules(requirement for extra in extras.values() for requirement in extra)
    assert imported("src") == core | optional
    assert imported("tests", "bench", "examples", "docs") - core - optional == work - CALLED
    assert work >= CALLED


def test_the_package_says_that_it_is_typed():
    assert (resources.files("limner") / "py.typed").is_file()
