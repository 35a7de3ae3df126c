"""Files and folders on other file systems, by fsspec URLs such as `s3://bucket/run`.

torch requires fsspec, which needs another package for most protocols (`s3fs` for s3).
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

from limner.errors import UserError

MAX_DOWNLOAD = 1 << 29  # bytes of a file
MAX_REASON = 200  # characters of an error of fsspec
_PROTOCOL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")  # two characters or more: a drive of Windows has one


@dataclass(frozen=True)
class Url:
    """A file or folder of another file system, with the methods of `Path`. They raise `UserError`."""

    text: str
    filesystem: Any = field(repr=False)
    path: str = field(repr=False)  # in the file system

    def __str__(self) -> str:
        return self.text

    def __truediv__(self, name: str) -> Url:
        return Url(f"{self.text.rstrip('/')}/{name}", self.filesystem, f"{self.path.rstrip('/')}/{name}")

    def is_dir(self) -> bool:
        """Return False for the name of a trace, without a request: some servers would send the file."""
        return not re.search(r"\.json(\.gz)?(\?|$)", self.text)

    def glob(self, pattern: str) -> list[Url]:
        """Return the entries of a folder whose name matches."""
        with _one_sentence(self.text, "read"):
            paths = [str(path).rstrip("/") for path in self.filesystem.ls(self.path, detail=False)]
        names = ((path.rpartition("/")[2], path) for path in paths)
        return [Url(f"{self.text.rstrip('/')}/{n}", self.filesystem, p) for n, p in names if fnmatchcase(n, pattern)]

    def open(self, mode: str = "rb") -> BinaryIO:
        """Download the file. Raises `UserError` if it is larger than `MAX_DOWNLOAD`."""
        with _one_sentence(self.text, "read"), io.BufferedReader(self.filesystem.open(self.path, mode)) as file:
            data = file.read(MAX_DOWNLOAD + 1)
        if len(data) > MAX_DOWNLOAD:
            raise UserError(f"{self} has more than {MAX_DOWNLOAD >> 20} MiB, the maximum: record fewer steps")
        return io.BytesIO(data)

    def read_bytes(self) -> bytes:
        return self.open().read()

    def write_bytes(self, data: bytes) -> None:
        with _one_sentence(self.text, "written"):
            with suppress(PermissionError):  # of a store that forbids to create buckets
                self.filesystem.makedirs(self.path.rpartition("/")[0], exist_ok=True)
            with self.filesystem.open(self.path, "wb") as file:
                file.write(data)


def path_or_url(place: str | Path | Url) -> Path | Url:
    """Return a `Url` for a URL of another file system, else a path. Raises `UserError` for unknown protocols."""
    if not isinstance(place, str) or not _PROTOCOL.match(place):
        return Path(place) if isinstance(place, str) else place
    with _one_sentence(place, "opened"):
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        filesystem, path = url_to_fs(place)
    return Path(path) if isinstance(filesystem, LocalFileSystem) else Url(place, filesystem, path)


@contextmanager
def _one_sentence(url: str, verb: str) -> Iterator[None]:
    """Raise `UserError` for any error of the block: each protocol has its own."""
    try:
        yield
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON]
        raise UserError(f"{url} cannot be {verb} ({reason}): check the URL, and the package for its protocol") from None
