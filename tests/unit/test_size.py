"""The package keeps to its budget of lines, and its functions and files stay short."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src/limner"
FILES = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
BUDGET = 45_350  # docs/log/2026-11-30.md, "Budget of 45,350 lines instead of 45,200"
NESTED = (ast.For, ast.While, ast.If, ast.With, ast.Try, ast.AsyncFor, ast.AsyncWith, ast.Match)
#: Kernels take their arguments one by one.
KERNELS = ("attention/triton_decode.py", "optim/triton_adamw.py", "quantization/triton_int8.py")


@pytest.fixture(scope="module")
def functions():
    return [
        (name, node)
        for name, text in FILES.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def depth(node, outer=0):
    """Levels of nested statements; `elif` adds none."""
    deepest = outer
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
            deepest = max(deepest, depth(child, outer + (isinstance(child, NESTED) and not is_elif)))
    return deepest


def test_the_package_keeps_to_its_budget():
    assert sum(len(text.splitlines()) for text in FILES.values()) <= BUDGET


def test_files_have_at_most_300_lines():
    assert not [name for name, text in FILES.items() if len(text.splitlines()) > 300]


def test_functions_have_at_most_60_lines(functions):
    assert not [f"{name}: {node.name}" for name, node in functions if node.end_lineno - node.lineno >= 60]


def test_functions_have_fewer_than_ten_parameters(functions):
    def count(arguments):
        return len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)

    assert not [f"{name}: {f.name}" for name, f in functions if count(f.args) >= 10 and name not in KERNELS]


def test_statements_are_nested_at_most_four_deep(functions):
    assert not [f"{name}: {node.name}" for name, node in functions if depth(node) > 4]
