"""Class names are unique: a search by name finds one class."""

import ast
from collections import defaultdict
from pathlib import Path

import limner


def test_no_two_classes_share_a_name() -> None:
    root, places = Path(limner.__path__[0]), defaultdict(list)
    for file in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(file.relative_to(root)))
    assert not {name: files for name, files in places.items() if len(files) > 1}
