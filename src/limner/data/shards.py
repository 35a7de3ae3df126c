"""Image-caption pairs in tar files, the layout of img2dataset and WebDataset.

A shard `00000.tar` holds, for each sample, `KEY.png` (or .jpg, .webp), `KEY.txt` (the caption;
several phrasings, one a line) and `KEY.json` (metadata: "split", ground truth, ...). Tars are read in
place: their headers are scanned once into an index of offsets, and a sample is then one `pread`.
A reader holds no open file, so threads share it and processes inherit it freely.

A folder that `ShardWriter` is still filling, or was killed in, contains a file `INCOMPLETE`; readers
refuse it. The last acts of a writer are `dataset.json`, the summary, and removing that mark. The
bytes are a function of the samples alone (no times, no owners), so the same data gives the same files.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import warnings
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from limner.data.foreign import MAX_BYTES, MAX_META, READ, counted, facts, fingerprint, open_regular, parse_json
from limner.data.samples import MAX_TEXT, Rejected, Sample, parse_captions
from limner.errors import UserError
from limner.files import LOCK, atomic_write_text, locked, naming

IMAGE_SUFFIXES = ("png", "jpg", "jpeg", "webp", "gif", "bmp", "tif", "tiff", "ppm")
SUMMARY, MARK = "dataset.json", "INCOMPLETE"
_BLOCK = 512
_MAX_EXTENSION = 1 << 20  # bytes of a long name and the like


def is_complete(folder: str | os.PathLike[str]) -> bool:
    """Whether a writer has finished the data set of a folder."""
    return (Path(folder) / SUMMARY).exists() and not (Path(folder) / MARK).exists()


class ShardWriter:
    """Write samples to a folder of shards; use it as a context manager.

    >>> with ShardWriter("out") as writer:
    ...     writer.write(png_bytes, ["a red circle"], {"split": "train"})

    Leaving the block by an exception leaves the folder marked as incomplete. A folder with such a
    mark is begun again; one that holds anything else, or that another process writes to, is a `UserError`.
    """

    def __init__(self, folder: str | os.PathLike[str], per_shard: int = 10_000) -> None:
        self.folder, self.per_shard = Path(folder), per_shard
        self.kept, self.rejected, self.splits = 0, Counter[str](), Counter[str]()
        self._tar: tarfile.TarFile | None = None
        self._file: BinaryIO | None = None
        self._lock = ExitStack()

    def _claim(self) -> None:
        present = {path.name for path in self.folder.iterdir() if path.name != LOCK}
        if present and MARK not in present:
            raise UserError(f"{self.folder} is not empty: name a new folder, or delete this one first")
        (self.folder / MARK).touch()
        for name in present:
            if name.removesuffix(".tmp").endswith(".tar") or name == SUMMARY:
                (self.folder / name).unlink()

    def write(
        self,
        image: bytes,
        captions: Sequence[str],
        meta: dict[str, Any] | None = None,
        suffix: str = "png",
    ) -> None:
        """Add a sample; `image` is an encoded picture and `suffix` says in which format."""
        if self.kept % self.per_shard == 0:
            self._finish_shard()
        key = f"{self.kept:09d}"
        meta = {"key": key, **(meta or {})}
        self._add(f"{key}.{suffix}", image)
        self._add(f"{key}.txt", "\n".join(captions).encode())
        self._add(f"{key}.json", json.dumps(meta, ensure_ascii=False).encode())
        self.kept += 1
        if "split" in meta:
            self.splits[meta["split"]] += 1

    def reject(self, reason: str) -> None:
        """Count a sample that is left out."""
        self.rejected[reason] += 1

    def summary(self) -> dict[str, Any]:
        """What `dataset.json` says: samples seen, kept, rejected by reason, kept by split."""
        return {
            "count": self.kept + sum(self.rejected.values()),
            "kept": self.kept,
            "rejected": dict(self.rejected.most_common()),
            "splits": dict(self.splits),
            "shards": -(-self.kept // self.per_shard),
        }

    def close(self, **extra: Any) -> None:
        """Complete the data set. `extra` goes into `dataset.json`."""
        self._finish_shard()
        text = json.dumps({**self.summary(), **extra}, indent=2, ensure_ascii=False)
        atomic_write_text(self.folder / SUMMARY, text + "\n")
        (self.folder / MARK).unlink(missing_ok=True)

    def _path(self) -> Path:
        return self.folder / f"{(self.kept - 1) // self.per_shard:05d}.tar"

    def _add(self, name: str, data: bytes) -> None:
        if self._tar is None:
            self._file = open(self.folder / "shard.tar.tmp", "wb")  # noqa: SIM115 (closed with the shard)
            self._tar = tarfile.TarFile(fileobj=self._file, mode="w", format=tarfile.USTAR_FORMAT)
        info = tarfile.TarInfo(name)
        info.size = len(data)
        with naming(self.folder):
            self._tar.addfile(info, io.BytesIO(data))

    def _finish_shard(self) -> None:
        if self._tar is None or self._file is None:
            return
        with naming(self.folder):
            self._tar.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        os.replace(self.folder / "shard.tar.tmp", self._path())
        self._tar = self._file = None

    def __enter__(self) -> ShardWriter:
        with ExitStack() as stack:
            stack.enter_context(locked(self.folder))
            self._claim()
            self._lock = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            if kind is None:
                self.close()
            elif self._file is not None:
                with suppress(OSError):  # what is still to be written is of no use
                    self._file.close()


class Member(NamedTuple):
    """A file in a tar: which of the archives joined in it, its name, where its bytes begin, how many they are.

    A link has a name and nothing else: its offset is `MISSING`.
    """

    archive: int
    name: str
    offset: int
    size: int


#: In place of an offset: why there is nothing to read.
MISSING, SECOND, AMBIGUOUS, DAMAGED = -1, -2, -3, -4
_REASONS = {
    MISSING: "missing image",
    SECOND: "second picture of a name",
    AMBIGUOUS: "duplicate key",
    DAMAGED: "damaged shard",
}


def tar_members(path: str | os.PathLike[str]) -> Iterator[Member]:
    """The files and links in a tar, by its headers alone, in all archives that are joined in it (`cat a.tar b.tar`).

    What cannot be walked any further (a damaged header, an end without the zero block that closes an archive, a
    file that cannot be opened) is one last member without a name, of offset `DAMAGED`, and a warning.
    """
    try:
        descriptor = open_regular(path)
    except OSError as error:
        warnings.warn(f"{path} cannot be read ({error.strerror}): it is left out", stacklevel=2)
        yield Member(0, "", DAMAGED, 0)
        return
    try:
        yield from _walk(descriptor, str(path))
    finally:
        os.close(descriptor)


def _walk(descriptor: int, path: str) -> Iterator[Member]:
    end = os.fstat(descriptor).st_size
    archive, at, ended = 0, 0, False
    said: dict[str, str] = {}  # what extensions say of the next member
    while at < end:
        block = os.pread(descriptor, _BLOCK, at)
        if not block.strip(b"\0"):
            at, ended = _skip_zeros(descriptor, at, end), True
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
            told = _extension(member.type, os.pread(descriptor, min(size, _MAX_EXTENSION), at))
            if told is None or size > _MAX_EXTENSION:
                break
            said.update(told)
        else:
            if member.type == tarfile.GNUTYPE_SPARSE and block[482]:
                while os.pread(descriptor, 1, at + 504) not in (b"\0", b""):  # more of its map
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
    if at < end or not ended or end % _BLOCK:  # an archive is whole blocks: what is not has lost something
        warnings.warn(f"{path} is damaged at byte {min(at, end)}: what follows is left out", stacklevel=3)
        yield Member(archive, "", DAMAGED, 0)


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


def _skip_zeros(descriptor: int, at: int, end: int) -> int:
    """The first block from `at` on that is not zero, or the end."""
    while at < end:
        some = os.pread(descriptor, 1 << 20, at)
        rest = some.lstrip(b"\0")
        if rest or not some:
            return at + (len(some) - len(rest)) // _BLOCK * _BLOCK if some else end
        at += len(some)
    return end


class ShardReader:
    """Random access to the samples of tar files, in the order of the files and within them.

    An element is a picture, with the caption and the metadata of the same key (the name without what
    follows its last dot; the same in another of the archives joined in a tar is another key), or a caption
    or metadata without a picture. Where keys come several times in an archive, the first picture goes with the
    first caption and so on if there are as many, or a single caption goes with the first picture. Beside
    these, each damaged tar is one element, since how many samples lie behind the damage is not known.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]], splits: Sequence[str | None] | None = None) -> None:
        """`splits` names the split of each file's samples, for those that name none themselves."""
        self.paths = [Path(path) for path in paths]
        self._splits = list(splits or [None] * len(self.paths))
        for folder in {path.parent for path in self.paths}:
            if (folder / MARK).exists():
                raise UserError(f"{folder} is incomplete: the command that writes it was interrupted; run it again")
        index = array("q")
        for shard, path in enumerate(self.paths):
            for row in _samples(tar_members(path)):
                index.extend((shard, *row))
        # [N, 7]: the shard, then offset and size of the picture, the caption and the metadata
        self._index = np.array(index, np.int64).reshape(-1, 7)

    def __len__(self) -> int:
        return len(self._index)

    def _read(self, index: int, *slots: int) -> list[bytes | None]:
        """The members in `slots` (0 picture, 1 caption, 2 metadata) of one sample."""
        shard, *where = self._index[index].tolist()
        if where[0] < MISSING:
            raise Rejected(_REASONS[where[0]])
        descriptor = os.open(self.paths[shard], READ)
        try:
            found = []
            for slot in slots:
                offset, size = where[2 * slot : 2 * slot + 2]
                limit, larger = _LIMITS[slot]
                if size > limit:
                    raise Rejected(larger)
                found.append(os.pread(descriptor, size, offset) if offset >= 0 else None)
            return found
        finally:
            os.close(descriptor)

    @counted
    def __getitem__(self, index: int) -> Sample:
        image, text, meta = self._read(index, 0, 1, 2)
        facts = self._facts(index, meta)
        if image is None:
            raise Rejected("missing image")
        captions = parse_captions(text if text is not None else facts.get("caption"))
        if len(image) < self._index[index, 2]:
            raise Rejected("broken image")  # the tar was cut off
        return Sample(image, captions, facts)

    @counted
    def meta(self, index: int) -> dict[str, Any]:
        return self._facts(index, self._read(index, 2)[0])

    def _facts(self, index: int, data: bytes | None) -> dict[str, Any]:
        try:
            meta = facts(parse_json(data or b"{}"))
        except ValueError:
            raise Rejected("broken metadata") from None
        split = self._splits[self._index[index, 0]]
        return meta if split is None else {"split": split, **meta}

    def fingerprint(self) -> str:
        return fingerprint(self.paths)


#: The most bytes of a picture, a caption and metadata, and the reason to reject what is larger.
_LIMITS = ((MAX_BYTES, "file too large"), (MAX_TEXT, "caption too long"), (MAX_META, "metadata too large"))


def _samples(members: Iterable[Member]) -> Iterator[list[int]]:
    """The elements of a tar: offset and size of the picture, the caption and the metadata."""
    nothing = (MISSING, 0)
    found: dict[tuple[int, str], tuple[list, list, list]] = {}
    damaged = False
    for member in members:
        damaged |= member.offset == DAMAGED
        stem, _, suffix = member.name.rpartition(".")
        suffix = suffix.lower()
        slot = {"txt": 1, "json": 2}.get(suffix, 0 if suffix in IMAGE_SUFFIXES else None)
        if slot is not None and stem.rpartition("/")[2]:
            slots = found.setdefault((member.archive, stem), ([], [], []))
            slots[slot].append((member.offset, member.size))
    for images, texts, metas in found.values():
        count = max(map(len, (images, texts, metas)))
        if all(len(slot) in (0, count) for slot in (images, texts, metas)):
            for row in zip(*(slot or [nothing] * count for slot in (images, texts, metas)), strict=True):
                yield [value for pair in row for value in pair]
        elif len(texts) <= 1 and len(metas) <= 1:
            yield [*images[0], *(texts or [nothing])[0], *(metas or [nothing])[0]]
            yield from [[SECOND, 0, *nothing, *nothing]] * (count - 1)
        else:
            yield from [[AMBIGUOUS, 0, *nothing, *nothing]] * count
    if damaged:
        yield [DAMAGED, 0, *nothing, *nothing]
