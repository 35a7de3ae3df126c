"""Safe reading of untrusted files and metadata.

The functions trust no name, size or type. They open only regular files, since reading a FIFO or a device may block
forever or never end. They read a bounded number of bytes, and return plain data or raise `Rejected`.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Sequence
from datetime import date, time
from typing import Any, BinaryIO

from limner.data.sample import HELD_OUT, TRAIN, Rejected, is_environment_error

__all__ = ["normalize_split", "open_regular", "read_file", "sanitize_metadata", "split_from_names"]

MAX_BYTES = 1 << 27  # of an encoded picture
MAX_META = 1 << 20  # characters of one sample's metadata, as JSON
MAX_COLUMNS = 10_000  # of a table
_MAX_DEPTH = 32  # of nested metadata
_MAX_NAME = 100  # characters of a split's name

#: limner's split for common names of splits, including the keywords of Hugging Face's `datasets`.
#: Validation and test data are both held out.
_SPLITS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("held-out", "held_out", "heldout", "validation", "valid", "val", "dev"), HELD_OUT),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), HELD_OUT),
}

#: Flags to open a regular file for reading, without blocking if a FIFO has replaced it.
_READ_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading; never block. Raises `OSError` for other paths."""
    if stat.S_ISREG(os.stat(path).st_mode):  # opening a device can have an effect
        descriptor = os.open(path, _READ_FLAGS)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):  # else it was replaced in between
            return open(descriptor, "rb")
        os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))


def read_file(
    path: str | os.PathLike[str], missing: str, limit: int = MAX_BYTES, larger: str = "file too large"
) -> bytes:
    """Read a regular file. Raises `Rejected` with reason `missing` if it cannot be read, or `larger` if it has more
    than `limit` bytes."""
    try:
        with open_regular(path) as file:
            data = file.read(limit + 1)
    except (OSError, ValueError) as error:  # ValueError for an invalid name
        if is_environment_error(error):
            raise
        raise Rejected(missing) from None
    if len(data) > limit:
        raise Rejected(larger)
    return data


def sanitize_metadata(raw: Any, split: str | None = None) -> dict[str, Any]:
    """Convert metadata to JSON values in UTF-8, and a known name of a split to "train" or "held-out".

    Omits top-level bytes, turns dates and decimals into text and NaN into null. `split` is the split of metadata that
    names none. Raises `Rejected`: "metadata too large", or "broken metadata" if it is nested too deep or if the split
    is not a name.
    """
    raw = raw if isinstance(raw, dict) else {}
    meta = _to_json({k: v for k, v in raw.items() if not isinstance(v, bytes | bytearray)}, [MAX_META], 0)
    name = meta.get("split")
    if name is None or name == "":
        meta.pop("split", None)
    elif not isinstance(name, str) or not name.isprintable() or len(name) > _MAX_NAME:
        raise Rejected("broken metadata")
    else:
        meta["split"] = normalize_split(name) or name
    return meta if split is None else {"split": split, **meta}


def normalize_split(word: str) -> str | None:
    """Return "train" or "held-out" for a known name of a split, else None."""
    return _SPLITS.get(word.strip().lower())


def split_from_names(names: Sequence[str]) -> str | None:
    """Return the split from the last name that contains a known word, or None."""
    for name in reversed(names):
        for word in re.split(r"[-._ 0-9]+", name):
            if split := normalize_split(word):
                return split
    return None


def _to_json(value: Any, remaining: list[int], depth: int) -> Any:
    kind = type(value)
    remaining[0] -= 8 + len(value) if kind is str else 8
    if remaining[0] < 0:
        raise Rejected("metadata too large")
    if kind is str:
        return _escape_surrogates(value)
    if value is None or kind is int or kind is bool:
        return value
    if kind is float:
        return value if value - value == 0 else None if value != value else str(value)
    if depth > _MAX_DEPTH:
        raise Rejected("broken metadata")
    if isinstance(value, dict):
        remaining[0] -= sum(map(len, map(str, value)))
        return {_escape_surrogates(str(name)): _to_json(item, remaining, depth + 1) for name, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_to_json(item, remaining, depth + 1) for item in value]
    if isinstance(value, bytes | bytearray):
        return f"{len(value)} bytes"
    return _to_json(value.isoformat() if isinstance(value, date | time) else str(value), remaining, depth)


def _escape_surrogates(text: str) -> str:
    """Replace surrogates, which represent invalid UTF-8 bytes, by escape sequences."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
