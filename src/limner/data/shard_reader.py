"""Reader of shards: samples in tar files written by `shard_writer.py` or by other tools.

The reader scans the headers of each tar once into an index of offsets, and then reads a sample's files with one `pread`
each. It unpacks nothing, checks all numbers in headers, and keeps no file open, so threads can share it and processes
can inherit it.
"""

from __future__ import annotations

import os
import tarfile
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from limner.data.sample import MAX_TEXT, Rejected, Sample, Source, fingerprint, parse_captions
from limner.data.sanitize import MAX_BYTES, MAX_META, open_regular, sanitize_metadata
from limner.data.shard_writer import INCOMPLETE_MARK
from limner.errors import UserError
from limner.json_files import parse_json

IMAGE_SUFFIXES = ("png", "jpg", "jpeg", "webp", "gif", "bmp", "tif", "tiff", "ppm")
_BLOCK = 512
_MAX_EXTENSION = 1 << 20  # bytes of an extension header, such as a long name
#: Long names and links of GNU, and the extended headers of pax, Solaris and whole archives.
_EXTENSION_TYPES = (b"L", b"K", b"x", b"X", b"g")
#: In place of the offset of an unreadable member; the last three reject the whole sample.
MISSING, DAMAGED, DUPLICATE_NAME, AMBIGUOUS = -1, -2, -3, -4
_REASONS = {DAMAGED: "damaged shard", DUPLICATE_NAME: "duplicate picture name", AMBIGUOUS: "duplicate key"}
_ABSENT = (MISSING, 0)
#: The most bytes of a picture, a caption and metadata, and the reason to reject larger ones.
_LIMITS = ((MAX_BYTES, "file too large"), (MAX_TEXT, "caption too long"), (MAX_META, "metadata too large"))


class ShardReader(Source):
    """A source of the samples in tar files, in file order.

    An element is a picture with the caption and the metadata of the same key, or a caption or metadata without a
    picture. A key is the name up to its last dot; equal names in different archives of a joined tar are different
    keys. If a key has equally many pictures and captions in an archive, they are paired in order; a single caption
    belongs to the first picture. Each damaged tar adds one element, since the number of samples after the damage is
    unknown. Raises `UserError` if a folder of the files is marked as incomplete.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]], splits: Sequence[str | None] | None = None) -> None:
        """`splits` holds, for each file, the split of its samples whose metadata names none."""
        self.paths = [Path(path) for path in paths]
        self._splits = list(splits or [None] * len(self.paths))
        for folder in {path.parent for path in self.paths}:
            if (folder / INCOMPLETE_MARK).exists():
                raise UserError(f"{folder} is incomplete, since its writer was interrupted: write it again")
        shards, spans = array("q"), array("q")
        for shard, path in enumerate(self.paths):
            for span in _samples(tar_members(path)):
                shards.append(shard)
                spans.extend(span)
        self._shards = np.array(shards, np.int64)
        self._spans = np.array(spans, np.int64).reshape(-1, 3, 2)  # offset and size of picture, caption and metadata

    def __len__(self) -> int:
        return len(self._shards)

    def read(self, index: int, picture: bool) -> Sample:
        image, text, meta = self._members(index, (0, 1, 2), picture)
        metadata = self._sanitize(index, meta)
        if image is None:
            raise Rejected("missing image")
        captions = parse_captions(text if text is not None else metadata.get("caption"))
        if picture and len(image) < self._spans[index, 0, 1]:
            raise Rejected("broken image")  # the tar is truncated
        return Sample(image, captions, metadata)

    def read_meta(self, index: int) -> dict[str, Any]:
        return self._sanitize(index, *self._members(index, (2,)))

    def fingerprint(self) -> str:
        return fingerprint(self.paths)

    def _members(self, index: int, slots: Sequence[int], picture: bool = True) -> list[bytes | None]:
        """Read a sample's picture (slot 0; no bytes without `picture`), caption (1) and metadata (2)."""
        spans = self._spans[index].tolist()
        if (mark := spans[0][0]) in _REASONS:
            raise Rejected(_REASONS[mark])
        for slot in slots:
            limit, larger = _LIMITS[slot]
            if spans[slot][1] > limit:
                raise Rejected(larger)
        if not picture:
            spans[0][1] = 0
        with open_regular(self.paths[self._shards[index]]) as file:
            read = partial(os.pread, file.fileno())
            return [read(size, offset) if offset >= 0 else None for offset, size in (spans[slot] for slot in slots)]

    def _sanitize(self, index: int, data: bytes | None) -> dict[str, Any]:
        try:
            return sanitize_metadata(parse_json(data or b"{}"), self._splits[self._shards[index]])
        except ValueError:
            raise Rejected("broken metadata") from None


def _samples(members: Iterable[Member]) -> Iterator[tuple[int, ...]]:
    """Yield the elements of a tar: offset and size of picture, caption and metadata."""
    by_key: dict[tuple[int, str], tuple[list, list, list]] = {}
    damaged = False
    for member in members:
        damaged |= member.offset == DAMAGED
        stem, _, suffix = member.name.rpartition(".")
        suffix = suffix.lower()
        slot = {"txt": 1, "json": 2}.get(suffix, 0 if suffix in IMAGE_SUFFIXES else None)
        if slot is not None and stem.rpartition("/")[2]:
            slots = by_key.setdefault((member.archive, stem), ([], [], []))
            slots[slot].append((member.offset, member.size))
    for slots in by_key.values():
        count = max(map(len, slots))
        first = [(slot or [_ABSENT])[0] for slot in slots]
        if all(len(slot) in (0, count) for slot in slots):
            rows = list(zip(*(slot or [_ABSENT] * count for slot in slots), strict=True))
        elif len(slots[1]) <= 1 and len(slots[2]) <= 1:
            rows = [first] + [[(DUPLICATE_NAME, 0), _ABSENT, _ABSENT]] * (count - 1)
        else:
            rows = [[(AMBIGUOUS, 0), _ABSENT, _ABSENT]] * count
        yield from (tuple(chain(*row)) for row in rows)
    if damaged:
        yield DAMAGED, 0, *_ABSENT, *_ABSENT


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
        file = open_regular(path)
    except OSError as error:
        warnings.warn(f"{path} cannot be read ({error.strerror}): skipping it", stacklevel=2)
        yield Member(0, "", DAMAGED, 0)
        return
    with file:
        for member in walk(partial(os.pread, file.fileno()), os.fstat(file.fileno()).st_size):
            if member.offset == DAMAGED:
                warnings.warn(f"{path} is damaged at byte {member.size}: the rest of the file is skipped", stacklevel=2)
            yield member


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
            values = _parse_extension(member.type, read(size, at)) if size <= _MAX_EXTENSION else None
            if values is None:
                break
            overrides |= values
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
