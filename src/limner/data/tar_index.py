"""An index of the files in a tar, from its headers alone, up to the first damage.

A tar may consist of several joined archives. The index unpacks no file and checks all numbers in headers.
"""

from __future__ import annotations

import os
import tarfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from limner.data.sanitize import open_regular

_BLOCK = 512
_MAX_EXTENSION = 1 << 20  # bytes of an extension header, such as a long name
MISSING, DAMAGED = -1, -2  # in place of the offset of an unreadable member


class Member(NamedTuple):
    """A file in a tar: number of its archive among the joined ones, name, offset and size in bytes.

    A link has the offset `MISSING` and size 0. If headers are damaged, or an archive lacks its closing zero block, the
    last member has an empty name, the offset `DAMAGED`, and as size the position of the damage.
    """

    archive: int
    name: str
    offset: int
    size: int


def tar_members(path: str | os.PathLike[str]) -> Iterator[Member]:
    """Yield the files and links in all joined archives of a tar (`cat a.tar b.tar`), from the headers alone.

    Warns of damage; yields one damaged member if the file cannot be opened.
    """
    try:
        descriptor = open_regular(path)
    except OSError as error:
        warnings.warn(f"{path} cannot be read ({error.strerror}): skipping it", stacklevel=2)
        yield Member(0, "", DAMAGED, 0)
        return
    try:
        for member in walk(partial(os.pread, descriptor), os.fstat(descriptor).st_size):
            if member.offset == DAMAGED:
                warnings.warn(f"{path} is damaged at byte {member.size}: the rest of the file is skipped", stacklevel=2)
            yield member
    finally:
        os.close(descriptor)


def walk(read: Callable[[int, int], bytes], end: int) -> Iterator[Member]:
    """`tar_members` of the `end` bytes that `read(size, offset)` returns, without warnings."""
    archive, at, ended = 0, 0, False
    overrides: dict[str, str] = {}  # extensions' values for the next member
    while at < end:
        block = read(_BLOCK, at)
        if not block.strip(b"\0"):
            at, ended = _skip_zeros(read, at, end), True
            continue
        try:
            member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError):
            break
        size = member.size if "size" not in overrides else int(overrides["size"])
        if not 0 <= size < 1 << 60:  # base-256 numbers may have 95 bits
            break
        if ended:
            archive, ended = archive + 1, False
        at += _BLOCK
        if member.type in _EXTENSION_TYPES:
            values = _parse_extension(member.type, read(min(size, _MAX_EXTENSION), at))
            if values is None or size > _MAX_EXTENSION:
                break
            overrides.update(values)
        else:
            if member.type == tarfile.GNUTYPE_SPARSE and block[482]:
                while read(1, at + 504) not in (b"\0", b""):  # further blocks of the sparse map
                    at += _BLOCK
                at += _BLOCK
            name = overrides.get("path", member.name)
            if member.isreg() and member.type != tarfile.GNUTYPE_SPARSE:
                yield Member(archive, name, at, size)
            elif not member.isdir():
                yield Member(archive, name, MISSING, 0)
            overrides = {}
        if member.isreg() or member.type in _EXTENSION_TYPES or member.type not in tarfile.SUPPORTED_TYPES:
            at += -(-size // _BLOCK) * _BLOCK
    if at < end or not ended or end % _BLOCK:  # a partial block shows truncation
        yield Member(archive, "", DAMAGED, min(at, end))


_EXTENSION_TYPES = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.XGLTYPE,
)


def _parse_extension(kind: bytes, data: bytes) -> dict[str, str] | None:
    """Return the "path" and "size" of the next member from an extension; None if it is damaged."""
    if kind == tarfile.GNUTYPE_LONGNAME:
        return {"path": data.split(b"\0")[0].decode("utf-8", "surrogateescape")}
    overrides: dict[str, str] = {}
    if kind not in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
        return overrides
    while data.strip(b"\0"):  # pax: "LENGTH KEY=VALUE\n", where LENGTH counts the whole record
        length, _, rest = data.partition(b" ")
        if not length.isdigit() or len(length) > 9 or not len(length) + 3 <= int(length) <= len(data):
            return None
        key, equals, value = rest[: int(length) - len(length) - 2].partition(b"=")
        if not equals or (key == b"size" and not (value.isdigit() and len(value) < 18)):
            return None
        if key in (b"path", b"size"):
            overrides[key.decode()] = value.decode("utf-8", "surrogateescape")
        data = data[int(length) :]
    return overrides


def _skip_zeros(read: Callable[[int, int], bytes], at: int, end: int) -> int:
    """Return the offset of the first nonzero block from `at` on, or `end`."""
    while at < end:
        chunk = read(1 << 20, at)
        nonzero = chunk.lstrip(b"\0")
        if nonzero or not chunk:
            return at + (len(chunk) - len(nonzero)) // _BLOCK * _BLOCK if chunk else end
        at += len(chunk)
    return end
