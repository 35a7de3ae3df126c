"""JSON that any program can read, and a reader that no file's content can bring down.

Written: NaN and infinities become null at any depth, since JSON has no such numbers. Read: values nested deeper than
`MAX_DEPTH` are malformed, so that code which follows them down cannot exhaust Python's stack, and whole numbers beyond
float64 become infinite, as 1e999 does, so that no comparison or conversion overflows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from limner.atomic_io import atomic_write_text, require_file
from limner.errors import UserError

MAX_BYTES = 4 << 20  # of a config or a record; other files have limits of their own
MAX_DEPTH = 200
_MAX_DIGITS = 308  # of a whole number that float64 holds, whatever the digits


def to_json(value: Any, indent: int | None = None, ensure_ascii: bool = True) -> str:
    """The value as JSON text. NaN and infinities become null."""
    return json.dumps(_finite(value), indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)


def write_json(path: str | Path, value: Any, indent: int | None = None, ensure_ascii: bool = True) -> None:
    """Write `to_json` of the value and a newline, all or nothing. Raises `UserError` for text that is not Unicode."""
    atomic_write_text(path, to_json(value, indent, ensure_ascii) + "\n")


def parse_json(data: bytes | str) -> Any:
    """Parse JSON text. Raises `ValueError` if it is malformed or nested too deep."""
    text = data if isinstance(data, str) else data.decode(json.detect_encoding(data), "surrogatepass")
    try:
        level = [value := _DECODER.decode(text)]
    except RecursionError:
        raise ValueError("nested too deep") from None
    for _ in range(MAX_DEPTH):
        parts = (part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list))
        level = [item for part in parts for item in part if isinstance(item, dict | list)]
        if not level:
            return value
    raise ValueError("nested too deep")


def read_json(path: str | Path, max_bytes: int = MAX_BYTES) -> Any:
    """Parse a JSON file that may come from anywhere. Raises `UserError` if it is missing, too large or malformed."""
    path = Path(path)
    require_file(path)
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
        if len(raw) > max_bytes:
            raise UserError(f"{path} is larger than {max_bytes >> 20} MiB, so it is not such a file")
        return parse_json(raw)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None


def read_mapping(path: str | Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Parse a file that holds a JSON object. Raises `UserError` for any other file."""
    value = read_json(path, max_bytes)
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object")
    return value


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """Parse the objects of a file with a JSON value on each line. Malformed lines and other values are left out."""
    rows = []
    for line in Path(path).read_bytes().splitlines():
        try:
            rows.append(parse_json(line))
        except ValueError:
            continue
    return [row for row in rows if isinstance(row, dict)]


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MAX_DIGITS else float(digits)


_DECODER = json.JSONDecoder(parse_int=_integer)
