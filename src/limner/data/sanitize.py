"""Safe reading of untrusted files and metadata.

The functions trust no name, size or type. They open only regular files, since reading a FIFO or a device may block
forever or never end. They read a bounded number of bytes, and return plain data or raise `Rejected`.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date, time
from pathlib import Path
from typing import Any, TypeVar

from limner.data.sample import HELD_OUT, TRAIN, Rejected, Sample, digest
from limner.errors import UserError

__all__ = [
    "Reader",
    "fingerprint",
    "is_environment_error",
    "normalize_split",
    "open_regular",
    "opened",
    "read_file",
    "sanitize_metadata",
    "split_from_names",
]

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

_T = TypeVar("_T")


def is_environment_error(error: Exception) -> bool:
    """Return True for a fault of the installation or the machine, which is not a sample's defect: a package that cannot
    be imported, too many open files, or any `UserError`."""
    files = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
    return files or isinstance(error, ImportError | UserError)


class Reader:
    """Base of the sources that read untrusted files.

    A subclass implements `__len__`, `read`, `read_meta` and `fingerprint`. `read` and `read_meta` raise `Rejected` on a
    defect. Any other exception is rejected as "unreadable sample", so that a bad sample never ends a loop over a
    source. Faults of the environment (`is_environment_error`) pass unchanged.
    """

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, index: int, picture: bool) -> Sample:
        """Return a sample. With `picture` False its image may be empty, and the picture's file is not opened."""
        raise NotImplementedError

    def read_meta(self, index: int) -> dict[str, Any]:
        """Return the metadata of a sample without opening the picture's file."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> Sample:
        return self._guarded(self.read, index, True)

    def captions(self, index: int) -> tuple[str, ...]:
        """See `Source.captions`."""
        return self._guarded(self.read, index, False).captions

    def meta(self, index: int) -> dict[str, Any]:
        """See `Source.meta`."""
        return self._guarded(self.read_meta, index)

    def _guarded(self, read: Callable[..., _T], index: int, *options: bool) -> _T:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        try:
            return read(index % len(self), *options)
        except Rejected:
            raise
        except Exception as error:
            if is_environment_error(error):
                raise
            raise Rejected("unreadable sample") from error


#: Flags to open a regular file for reading, without blocking if a FIFO has replaced it.
_READ_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def open_regular(path: str | os.PathLike[str]) -> int:
    """Open a regular file for reading and return its descriptor; never block. Raises `OSError` for other paths."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a device can have an effect
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    descriptor = os.open(path, _READ_FLAGS)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # it was replaced in between
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return descriptor


def read_file(
    path: str | os.PathLike[str], missing: str, limit: int = MAX_BYTES, larger: str = "file too large"
) -> bytes:
    """Read a regular file. Raises `Rejected` with reason `missing` if it cannot be read, or `larger` if it has more
    than `limit` bytes."""
    try:
        with open(open_regular(path), "rb") as file:
            data = file.read(limit + 1)
    except (OSError, ValueError) as error:  # ValueError for an invalid name
        if is_environment_error(error):
            raise
        raise Rejected(missing) from None
    if len(data) > limit:
        raise Rejected(larger)
    return data


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[int]:
    """Open a file for `os.pread`, which threads can call at the same time; yields the descriptor."""
    descriptor = os.open(path, _READ_FLAGS)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def fingerprint(paths: Iterable[Path]) -> str:
    """Hash the names, sizes and times of files; only the names of unreadable files."""
    parts = []
    for path in paths:
        try:
            status = path.stat()
            parts.append(f"{path.name} {status.st_size} {status.st_mtime_ns}")
        except OSError:
            parts.append(f"{path.name} unreadable")
    return digest(*parts)


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
