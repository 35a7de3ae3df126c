"""Private names of torch and tyro: all in `limner.compat`, with the last versions that may be installed."""

import ast
import re
from pathlib import Path

import pytest

from limner import compat

SOURCE = Path(compat.__file__).parent


def dotted(node: ast.expr) -> list[str]:
    """Return the names of a chain of attributes: `torch.ops.aten` is torch, ops, aten."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def private_names(tree: ast.AST) -> list[str]:
    """Return the private names of torch and tyro that a module imports or reads."""
    chains = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            chains += [[*node.module.split("."), alias.name] for alias in node.names]
        elif isinstance(node, ast.Import):
            chains += [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.Attribute):
            chains.append(dotted(node))
    return [
        ".".join(chain)
        for chain in chains
        if chain[:1] in (["torch"], ["tyro"])
        and any(part.startswith("_") and not part.startswith("__") for part in chain)
    ]


@pytest.mark.parametrize("name", compat.PRIVATE)
def test_every_name_exists(name):
    assert getattr(compat, name) is not None


def test_the_checked_versions_are_the_last_that_may_be_installed():
    bounds = dict(
        re.findall(r'"(torch|tyro)>=[\d.]+,<([\d.]+)"', (SOURCE.parents[1] / "pyproject.toml").read_text("utf-8"))
    )
    checked = {tuple(when.split(" ")) for _, when in compat.PRIVATE.values()}
    major_minor = {(package, *map(int, number.split("."))) for package, number in checked}
    assert {(package, major, minor + 1) for package, major, minor in major_minor} == {
        (package, *map(int, bound.split("."))) for package, bound in bounds.items()
    }


def test_an_unknown_name_raises():
    with pytest.raises(AttributeError, match="no private name 'int_gemm'"):
        compat.int_gemm  # noqa: B018


def test_no_other_module_uses_private_names():
    files = [path for path in sorted(SOURCE.rglob("*.py")) if path.name != "compat.py"]
    assert len(files) > 100
    used = {path.name: names for path in files if (names := private_names(ast.parse(path.read_text("utf-8"))))}
    assert used == {}
    assert private_names(ast.parse("import torch\ntorch.ops.aten._x(1)\nfrom tyro import _errors")) == [
        "tyro._errors",
        "torch.ops.aten._x",
    ]
