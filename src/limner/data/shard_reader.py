"""Reader of shards: samples in tar files written by `shard_writer.py` or by other tools.

The reader scans the headers of each tar once into an index of offsets, and then reads each file of a sample with one
`pread`. It keeps no file open, so threads can share it and processes can inherit it.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from limner.data.sample import MAX_TEXT, Rejected, Sample, parse_captions
from limner.data.sanitize import MAX_BYTES, MAX_META, READ_FLAGS, fingerprint, reject_on_error, sanitize_metadata
from limner.data.shard_writer import INCOMPLETE_MARK
from limner.data.tar_index import DAMAGED, MISSING, Member, tar_members
from limner.errors import UserError
from limner.json_files import parse_json

IMAGE_SUFFIXES = ("png", "jpg", "jpeg", "webp", "gif", "bmp", "tif", "tiff", "ppm")
DUPLICATE_NAME, AMBIGUOUS = -3, -4  # in place of an offset, like `MISSING` and `DAMAGED`
_REASONS = {
    MISSING: "missing image",
    DUPLICATE_NAME: "duplicate picture name",
    AMBIGUOUS: "duplicate key",
    DAMAGED: "damaged shard",
}


class ShardReader:
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
        index = array("q")
        for shard, path in enumerate(self.paths):
            for row in _samples(tar_members(path)):
                index.extend((shard, *row))
        # [N, 7]: shard, then offset and size of picture, caption and metadata
        self._index = np.array(index, np.int64).reshape(-1, 7)

    def __len__(self) -> int:
        return len(self._index)

    def _read(self, index: int, *slots: int) -> list[bytes | None]:
        """Read the members in `slots` (0 picture, 1 caption, 2 metadata) of a sample."""
        shard, *spans = self._index[index].tolist()
        if spans[0] < MISSING:
            raise Rejected(_REASONS[spans[0]])
        descriptor = os.open(self.paths[shard], READ_FLAGS)
        try:
            members: list[bytes | None] = []
            for slot in slots:
                offset, size = spans[2 * slot : 2 * slot + 2]
                limit, larger = _LIMITS[slot]
                if size > limit:
                    raise Rejected(larger)
                members.append(os.pread(descriptor, size, offset) if offset >= 0 else None)
            return members
        finally:
            os.close(descriptor)

    @reject_on_error
    def __getitem__(self, index: int) -> Sample:
        image, text, meta = self._read(index, 0, 1, 2)
        metadata = self._metadata_of(index, meta)
        if image is None:
            raise Rejected("missing image")
        captions = parse_captions(text if text is not None else metadata.get("caption"))
        if len(image) < self._index[index, 2]:
            raise Rejected("broken image")  # the tar is truncated
        return Sample(image, captions, metadata)

    @reject_on_error
    def meta(self, index: int) -> dict[str, Any]:
        return self._metadata_of(index, self._read(index, 2)[0])

    def _metadata_of(self, index: int, data: bytes | None) -> dict[str, Any]:
        try:
            meta = sanitize_metadata(parse_json(data or b"{}"))
        except ValueError:
            raise Rejected("broken metadata") from None
        split = self._splits[self._index[index, 0]]
        return meta if split is None else {"split": split, **meta}

    def fingerprint(self) -> str:
        return fingerprint(self.paths)


#: The most bytes of a picture, a caption and metadata, and the reason to reject larger ones.
_LIMITS = ((MAX_BYTES, "file too large"), (MAX_TEXT, "caption too long"), (MAX_META, "metadata too large"))


def _samples(members: Iterable[Member]) -> Iterator[list[int]]:
    """Yield the elements of a tar: offset and size of picture, caption and metadata."""
    absent = (MISSING, 0)
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
    for images, texts, metas in by_key.values():
        count = max(map(len, (images, texts, metas)))
        if all(len(slot) in (0, count) for slot in (images, texts, metas)):
            for row in zip(*(slot or [absent] * count for slot in (images, texts, metas)), strict=True):
                yield [value for pair in row for value in pair]
        elif len(texts) <= 1 and len(metas) <= 1:
            yield [*images[0], *(texts or [absent])[0], *(metas or [absent])[0]]
            yield from [[DUPLICATE_NAME, 0, *absent, *absent]] * (count - 1)
        else:
            yield from [[AMBIGUOUS, 0, *absent, *absent]] * count
    if damaged:
        yield [DAMAGED, 0, *absent, *absent]
