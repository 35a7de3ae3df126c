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
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from limner.data.samples import Rejected, Sample, digest, parse_captions
from limner.errors import UserError
from limner.files import LOCK, atomic_write_text, locked

IMAGE_SUFFIXES = ("png", "jpg", "jpeg", "webp", "gif", "bmp", "tif", "tiff", "ppm")
SUMMARY, MARK = "dataset.json", "INCOMPLETE"
_BLOCK = 512
_MAX_MEMBER = 1 << 30  # a header that claims a longer file is taken for a broken one


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
        self._tar.addfile(info, io.BytesIO(data))

    def _finish_shard(self) -> None:
        if self._tar is None or self._file is None:
            return
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
                self._file.close()


def tar_members(path: str | os.PathLike[str]) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of each regular file in a tar, by its headers alone.

    A damaged header ends the walk with a warning. Long names (GNU and pax) are read by `tarfile`.
    """
    with open(path, "rb") as file:
        end = os.fstat(file.fileno()).st_size
        at = 0
        while at + _BLOCK <= end:
            header = os.pread(file.fileno(), _BLOCK, at)
            if header[:1] == b"\0":
                return  # the zero block that ends an archive
            try:
                member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
            except tarfile.HeaderError:
                member = None
            if member is None or not 0 <= member.size <= _MAX_MEMBER:
                warnings.warn(f"{path} is damaged at byte {at}: the rest is left out", stacklevel=2)
                return
            if not (member.isreg() or member.isdir()) or member.issparse():
                yield from _slow_members(path, at)  # long names and other extensions
                return
            if member.isreg():
                yield member.name, at + _BLOCK, member.size
            at += _BLOCK + -(-member.size // _BLOCK) * _BLOCK


def _slow_members(path: str | os.PathLike[str], at: int) -> Iterator[tuple[str, int, int]]:
    with open(path, "rb") as file:
        file.seek(at)
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                for member in tar:
                    if member.isreg() and not member.issparse():
                        yield member.name, member.offset_data, member.size
        except tarfile.TarError:
            warnings.warn(f"{path} is damaged after byte {at}: the rest is left out", stacklevel=2)


class ShardReader:
    """Random access to the samples of tar files, in the order of the files and within them."""

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        self.paths = [Path(path) for path in paths]
        for folder in {path.parent for path in self.paths}:
            if (folder / MARK).exists():
                raise UserError(f"{folder} is incomplete: the command that writes it was interrupted; run it again")
        rows: list[tuple[int, ...]] = []
        for shard, path in enumerate(self.paths):
            samples: dict[str, list[int]] = {}
            for name, offset, size in tar_members(path):
                folder, _, base = name.rpartition("/")
                stem, _, suffix = base.partition(".")  # WebDataset: the key ends at the first dot
                suffix = suffix.lower()
                slot = {"txt": 2, "json": 4}.get(suffix, 0 if suffix in IMAGE_SUFFIXES else None)
                if slot is None or not stem:
                    continue
                row = samples.setdefault(f"{folder}/{stem}", [shard, -1, 0, -1, 0, -1, 0])
                row[slot + 1 : slot + 3] = offset, size
            rows += map(tuple, samples.values())
        # [N, 7]: the shard, then offset and size of the picture, the caption and the metadata
        self._index = np.array(rows, np.int64).reshape(-1, 7)

    def __len__(self) -> int:
        return len(self._index)

    def _read(self, index: int, *slots: int) -> list[bytes | None]:
        """The members in `slots` (0 picture, 1 caption, 2 metadata) of one sample."""
        shard, *where = self._index[index].tolist()
        descriptor = os.open(self.paths[shard], os.O_RDONLY)
        try:
            return [
                os.pread(descriptor, where[2 * slot + 1], where[2 * slot]) if where[2 * slot] >= 0 else None
                for slot in slots
            ]
        finally:
            os.close(descriptor)

    def __getitem__(self, index: int) -> Sample:
        image, text, meta = self._read(index, 0, 1, 2)
        facts = _parse_meta(meta)
        captions = parse_captions(text if text is not None else facts.get("caption"))
        if image is None:
            raise Rejected("missing image")
        if len(image) < self._index[index, 2]:
            raise Rejected("broken image")  # the tar was cut off
        return Sample(image, captions, facts)

    def meta(self, index: int) -> dict[str, Any]:
        return _parse_meta(self._read(index, 2)[0])

    def fingerprint(self) -> str:
        stats = [(path.name, path.stat()) for path in self.paths]
        return digest(*(f"{name} {s.st_size} {s.st_mtime_ns}" for name, s in stats))


def _parse_meta(data: bytes | None) -> dict[str, Any]:
    try:
        meta = json.loads(data or b"{}")
    except ValueError:
        raise Rejected("broken metadata") from None
    return meta if isinstance(meta, dict) else {}
