"""Public names: `__all__` of each module that documentation imports from. A new public name is added there."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

import limner

SOURCE = Path(limner.__path__[0])
ROOT = SOURCE.parents[1]
PAGES = [
    *ROOT.glob("*.md"),
    *(path for path in (ROOT / "docs").rglob("*.md") if "log" not in path.parts),
    *(ROOT / "examples").glob("*.py"),
]


def module_name(path: Path) -> str:
    return ".".join(["limner", *path.relative_to(SOURCE).with_suffix("").parts]).removesuffix(".__init__")


PUBLIC = {
    module_name(path): ast.parse(path.read_text("utf-8"))
    for path in sorted(SOURCE.rglob("*.py"))
    if re.search(r"^__all__ = ", path.read_text("utf-8"), re.MULTILINE)
}


@pytest.mark.parametrize("name", PUBLIC)
def test_all_lists_the_classes_and_functions_without_an_underscore(name):
    module = import_module(name)
    defined = [node for node in PUBLIC[name].body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    public = {node.name for node in defined if not node.name.startswith("_")}
    assert public <= set(module.__all__)
    assert all(hasattr(module, listed) for listed in module.__all__)
    assert [node.name for node in defined if node.name in public and not ast.get_docstring(node)] == []


def test_documentation_imports_public_names():
    imports = set()
    for path in PAGES:
        for match in re.finditer(
            r"^ *from (limner[\w.]*) import (\([^)]*\)|.*)$", path.read_text("utf-8"), re.MULTILINE
        ):
            imports |= {(match[1], imported) for imported in re.findall(r"\w+", match[2].partition("#")[0])}
    assert len(imports) > 30
    modules = {module_name(path) for path in SOURCE.rglob("*.py")}
    private = {
        (module, imported)
        for module, imported in imports
        if f"{module}.{imported}" not in modules and not module.startswith("limner.cli")  # for contributors
        if module not in PUBLIC or imported not in import_module(module).__all__
    }
    assert private == set()
