"""Where the files in a tar lie, found from its headers alone, up to the first damage.

A tar may be several joined archives. Nothing is unpacked, and numbers in a header are checked against bounds.
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
_MAX_EXTENSION = 1 << 20  # bytes of a long name and the like
MISSING, DAMAGED = -1, -2  # in place of an offset: why there is nothing to read


class Member(NamedTuple):
    """A file in a tar: the number of its archive among the joined ones, its name, the offset and number of its bytes.

    A link has a name and nothing else: its offset is `MISSING`. Where the headers cannot be followed any further (a
    damaged header, an archive without its closing zero block) there is a last member without a name, of offset
    `DAMAGED`, whose size is the place of the damage.
    """

    archive: int
    name: str
    offset: int
    size: int


def tar_members(path: str | os.PathLike[str]) -> Iterator[Member]:
    """The files and links in a tar, by its headers alone, in all archives that are joined in it (`cat a.tar b.tar`).

    Warns of damage; a file that cannot be opened is one damaged member.
    """
    try:
        descriptor = open_regular(path)
    except OSError as error:
        warnings.warn(f"{path} cannot be read ({error.strerror}): it is left out", stacklevel=2)
        yield Member(0, "", DAMAGED, 0)
        return
    try:
        for member in walk(partial(os.pread, descriptor), os.fstat(descriptor).st_size):
            if member.offset == DAMAGED:
                warnings.warn(f"{path} is damaged at byte {member.size}: what follows is left out", stacklevel=2)
            yield member
    finally:
        os.close(descriptor)


def walk(read: Callable[[int, int], bytes], end: int) -> Iterator[Member]:
    """`tar_members` of `end` bytes, which `read` gives by number and offset; without warnings."""
    archive, at, ended = 0, 0, False
    said: dict[str, str] = {}  # what extensions say of the next member
    while at < end:
        block = read(_BLOCK, at)
        if not block.strip(b"\0"):
            at, ended = _skip_zeros(read, at, end), True
            continue
        try:
            member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError):
            break
        size = member.size if "size" not in said else int(said["size"])
        if not 0 <= size < 1 << 60:  # base-256 numbers may have 95 bits
            break
        if ended:
            archive, ended = archive + 1, False
        at += _BLOCK
        if member.type in _EXTENSIONS:
            told = _extension(member.type, read(min(size, _MAX_EXTENSION), at))
            if told is None or size > _MAX_EXTENSION:
                break
            said.update(told)
        else:
            if member.type == tarfile.GNUTYPE_SPARSE and block[482]:
                while read(1, at + 504) not in (b"\0", b""):  # more of its map
                    at += _BLOCK
                at += _BLOCK
            name = said.get("path", member.name)
            if member.isreg() and member.type != tarfile.GNUTYPE_SPARSE:
                yield Member(archive, name, at, size)
            elif not member.isdir():
                yield Member(archive, name, MISSING, 0)
            said = {}
        if member.isreg() or member.type in _EXTENSIONS or member.type not in tarfile.SUPPORTED_TYPES:
            at += -(-size // _BLOCK) * _BLOCK
    if at < end or not ended or end % _BLOCK:  # an archive is whole blocks: one that is not has lost something
        yield Member(archive, "", DAMAGED, min(at, end))


_EXTENSIONS = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.XGLTYPE,
)


def _extension(kind: bytes, data: bytes) -> dict[str, str] | None:
    """The "path" and "size" that an extension gives to the next member; None if it is damaged."""
    if kind == tarfile.GNUTYPE_LONGNAME:
        return {"path": data.split(b"\0")[0].decode("utf-8", "surrogateescape")}
    said: dict[str, str] = {}
    if kind not in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
        return said
    while data.strip(b"\0"):  # pax: "LENGTH KEY=VALUE\n", the length being that of all of it
        length, _, rest = data.partition(b" ")
        if not length.isdigit() or len(length) > 9 or not len(length) + 3 <= int(length) <= len(data):
            return None
        key, equals, value = rest[: int(length) - len(length) - 2].partition(b"=")
        if not equals or (key == b"size" and not (value.isdigit() and len(value) < 18)):
            return None
        if key in (b"path", b"size"):
            said[key.decode()] = value.decode("utf-8", "surrogateescape")
        data = data[int(length) :]
    return said


def _skip_zeros(read: Callable[[int, int], bytes], at: int, end: int) -> int:
    """The first block from `at` on that is not zero, or the end."""
    while at < end:
        some = read(1 << 20, at)
        rest = some.lstrip(b"\0")
        if rest or not some:
            return at + (len(some) - len(rest)) // _BLOCK * _BLOCK if some else end
        at += len(some)
    return end
