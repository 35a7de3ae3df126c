"""Standard-conforming JSON output, and a JSON parser for untrusted files.

Writing replaces NaN and infinities, which JSON does not define, by null. Reading rejects values nested deeper than
`MAX_DEPTH`, so that recursive code cannot exhaust Python's stack. Integers beyond float64 become infinite, as 1e999
does, so that later comparisons and conversions do not overflow.
"""

import json
import math
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from limner.atomic_io import atomic_write_text, require_file
from limner.errors import UserError

MAX_BYTES = 4 << 20  # of a config or a record; callers pass other limits for other files
MAX_DEPTH = 200
_MAX_DIGITS = 308  # any integer with this many digits fits into float64


def to_json(value: Any, indent: int | None = None, ensure_ascii: bool = True) -> str:
    """Return the value as JSON text. NaN and infinities become null."""
    return json.dumps(_finite(value), indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)


def write_json(path: str | Path, value: Any, indent: int | None = None, ensure_ascii: bool = True) -> None:
    """Write `to_json` of the value and a newline atomically. Raises `UserError` for text that UTF-8 cannot encode."""
    atomic_write_text(path, to_json(value, indent, ensure_ascii) + "\n")


def parse_json(data: bytes | str) -> Any:
    """Parse JSON text. Raises `ValueError` if the text is malformed or nested deeper than `MAX_DEPTH`."""
    text = data if isinstance(data, str) else data.decode(json.detect_encoding(data), "surrogatepass")
    try:
        level = [value := _DECODER.decode(text)]
    except RecursionError:
        raise ValueError("nested too deep") from None
    for _ in range(MAX_DEPTH):
        parts = (part.values() if type(part) is dict else part for part in level if type(part) in _CONTAINERS)
        level = [item for item in chain.from_iterable(parts) if type(item) in _CONTAINERS]
        if not level:
            return value
    raise ValueError("nested too deep")


def read_json(path: str | Path, max_bytes: int = MAX_BYTES) -> Any:
    """Parse an untrusted JSON file. Raises `UserError` if the file is missing, too large or malformed."""
    path = Path(path)
    require_file(path)
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
        if len(raw) > max_bytes:
            raise UserError(f"{path} is larger than {max_bytes >> 20} MiB, the maximum for this kind of file")
        return parse_json(raw)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None


def read_mapping(path: str | Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Parse a file with a JSON object. Raises `UserError` for any other file."""
    value = read_json(path, max_bytes)
    if not isinstance(value, dict):
        raise UserError(f"{path} must contain a JSON object")
    return value


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """Parse the objects of a JSON Lines file. Skip malformed lines and values of other types."""
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


_CONTAINERS = {dict, list}
_DECODER = json.JSONDecoder(parse_int=_integer)
