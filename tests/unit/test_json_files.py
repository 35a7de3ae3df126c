"""Written files are JSON for any reader; reading is bounded for any content."""

import ast
import json
import math
from pathlib import Path

import numpy as np
import pytest

import limner
from limner.errors import UserError
from limner.json_files import MAX_DEPTH, parse_json, read_json, read_lines, read_mapping, to_json, write_json


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


def test_numbers_that_are_not_finite_become_null_at_any_depth() -> None:
    nan, inf = math.nan, math.inf
    value = {"a": nan, "b": {"c": [1.5, -inf, {"d": (inf, 2)}]}, "e": np.float64(nan), "f": True, "g": "NaN"}
    expected = {"a": None, "b": {"c": [1.5, None, {"d": [None, 2]}]}, "e": None, "f": True, "g": "NaN"}
    for indent in (None, 2):
        assert json.loads(to_json(value, indent), parse_constant=refuse) == expected


def test_a_file_is_written_as_asked(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"é": [1]})
    assert (tmp_path / "a.json").read_bytes() == b'{"\\u00e9": [1]}\n'
    write_json(tmp_path / "a.json", {"é": [1]}, indent=1, ensure_ascii=False)
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == '{\n "é": [\n  1\n ]\n}\n'
    assert read_mapping(tmp_path / "a.json") == {"é": [1]}


@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_nesting_is_bounded(begin: str, end: str) -> None:
    levels = begin.count("[") + begin.count("{")
    for depth in (MAX_DEPTH // levels, 1):
        assert to_json(parse_json(begin * depth + "1" + end * depth)).count("1") == 1
    for depth in (MAX_DEPTH // levels + 1, 400, 100_000):
        for text in (begin * depth + "1" + end * depth, begin * depth):
            with pytest.raises(ValueError, match="nested too deep|Expecting value|Expecting property name"):
                parse_json(text)


def test_whole_numbers_beyond_float64_are_infinite() -> None:
    assert parse_json("[1e999, -1e999]") == parse_json(f"[{10**400}, -{'9' * 5_000}]") == [math.inf, -math.inf]
    assert parse_json(str(2**1000)) == 2**1000 and type(parse_json(str(2**1000))) is int
    assert math.isfinite(parse_json("9" * 308)) and math.isfinite(parse_json("-" + "9" * 307))


WRONG = {
    "empty": b"", "null": b"null", "a list": b"[1]", "a number": b"3", "a text": b'"x"', "cut": b'{"a": 1',
    "deep": b'{"a":' * 100_000, "no UTF-8": b'{"a": "\xff"}', "zeros": b"\0" * 64,
}  # fmt: skip


@pytest.mark.parametrize("content", WRONG)
def test_a_file_without_an_object_is_one_sentence(content: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(WRONG[content])
    with pytest.raises(UserError, match=r"x\.json (is not valid JSON|must contain a JSON object)") as caught:
        read_mapping(path)
    assert "\n" not in str(caught.value)


def test_unreadable_files_raise_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_json(tmp_path / "x.json")
    with pytest.raises(UserError, match="is a folder, a pipe or a device"):
        read_json(tmp_path)
    (tmp_path / "x.json").write_text("[" + "1," * 600_000 + "1]")
    assert len(read_json(tmp_path / "x.json")) == 600_001
    with pytest.raises(UserError, match="larger than 1 MiB"):
        read_json(tmp_path / "x.json", 1 << 20)


def test_objects_are_read_from_lines(tmp_path: Path) -> None:
    rows = [{"a": 1}, {"a": "\u2028"}]
    lines = [to_json(rows[0]).encode(), *WRONG.values(), json.dumps(rows[1], ensure_ascii=False).encode(), b'{"a"']
    (tmp_path / "x.jsonl").write_bytes(b"\r\n".join(lines))
    assert read_lines(tmp_path / "x.jsonl") == rows


#: Where numbers must come back as they were, NaN included, where the text is not read again, and messages to a child.
DIRECT = {
    "json_files.py", "evaluation/icon_classifier.py", "experiments/sweep.py", "tasks/svg.py", "text/bpe.py",
    "training/checkpoint.py", "training/config.py",
}  # fmt: skip


def test_all_json_goes_through_this_module() -> None:
    package, found = Path(limner.__file__).parent, set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import) and any(alias.name == "json" for alias in node.names):
                found.add(path.relative_to(package).as_posix())
    assert found == DIRECT
