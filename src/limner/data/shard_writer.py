"""Writer of shards: image-caption pairs in tar files, in the layout of img2dataset and WebDataset.

A shard `00000.tar` holds, for each sample, `KEY.png` (or .jpg, .webp), `KEY.txt` (the caption;
several phrasings, one per line) and `KEY.json` (metadata: "split", ground truth, ...).

An unfinished folder contains a file `INCOMPLETE`, for which readers raise `UserError`. A writer finally
writes the summary `dataset.json` and removes this mark. The bytes of a shard depend only on its samples
(no times, no owners), so the same data gives the same files.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from limner.atomic_io import LOCK, exclusive_lock, with_filename
from limner.errors import UserError
from limner.json_files import to_json, write_json

SUMMARY, INCOMPLETE_MARK = "dataset.json", "INCOMPLETE"


def is_complete(folder: str | os.PathLike[str]) -> bool:
    """Return True if a writer has finished the data set in `folder`."""
    return (Path(folder) / SUMMARY).exists() and not (Path(folder) / INCOMPLETE_MARK).exists()


class ShardWriter:
    """A context manager that writes samples to a folder of shards.

    >>> with ShardWriter("out") as writer:
    ...     writer.write(png_bytes, ["a red circle"], {"split": "train"})

    After an exception the folder stays marked as incomplete. Entering the block overwrites a folder with
    this mark. It raises `UserError` for any other folder with files, or if another process writes to it.
    """

    def __init__(self, folder: str | os.PathLike[str], per_shard: int = 10_000) -> None:
        self.folder, self.per_shard = Path(folder), per_shard
        self.kept, self.rejected, self.splits = 0, Counter[str](), Counter[str]()
        self._tar: tarfile.TarFile | None = None
        self._file: BinaryIO | None = None
        self._lock = ExitStack()

    def _prepare_folder(self) -> None:
        present = {path.name for path in self.folder.iterdir() if path.name != LOCK}
        if present and INCOMPLETE_MARK not in present:
            raise UserError(f"{self.folder} is not empty: name a new folder, or delete this one first")
        (self.folder / INCOMPLETE_MARK).touch()
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
        """Add a sample. `image` is an encoded picture and `suffix` its file suffix."""
        if self.kept % self.per_shard == 0:
            self._finish_shard()
        key = f"{self.kept:09d}"
        meta = {"key": key, **(meta or {})}
        self._add(f"{key}.{suffix}", image)
        self._add(f"{key}.txt", "\n".join(captions).encode())
        self._add(f"{key}.json", to_json(meta, ensure_ascii=False).encode())
        self.kept += 1
        if "split" in meta:
            self.splits[meta["split"]] += 1

    def reject(self, reason: str) -> None:
        """Count a rejected sample."""
        self.rejected[reason] += 1

    def summary(self) -> dict[str, Any]:
        """Return the content of `dataset.json`: numbers of samples (all, kept, by reason, by split) and shards."""
        return {
            "count": self.kept + sum(self.rejected.values()),
            "kept": self.kept,
            "rejected": dict(self.rejected.most_common()),
            "splits": dict(self.splits),
            "shards": -(-self.kept // self.per_shard),
        }

    def close(self, **extra: Any) -> None:
        """Complete the data set, with `extra` in `dataset.json`."""
        self._finish_shard()
        write_json(self.folder / SUMMARY, {**self.summary(), **extra}, indent=2, ensure_ascii=False)
        (self.folder / INCOMPLETE_MARK).unlink(missing_ok=True)

    def _path(self) -> Path:
        return self.folder / f"{(self.kept - 1) // self.per_shard:05d}.tar"

    def _add(self, name: str, data: bytes) -> None:
        if self._tar is None:
            self._file = open(self.folder / "shard.tar.tmp", "wb")  # noqa: SIM115 (closed with the shard)
            self._tar = tarfile.TarFile(fileobj=self._file, mode="w", format=tarfile.USTAR_FORMAT)
        info = tarfile.TarInfo(name)
        info.size = len(data)
        with with_filename(self.folder):
            self._tar.addfile(info, io.BytesIO(data))

    def _finish_shard(self) -> None:
        if self._tar is None or self._file is None:
            return
        with with_filename(self.folder):
            self._tar.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        os.replace(self.folder / "shard.tar.tmp", self._path())
        self._tar = self._file = None

    def __enter__(self) -> ShardWriter:
        with ExitStack() as stack:
            stack.enter_context(exclusive_lock(self.folder))
            self._prepare_folder()
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
                with suppress(OSError):  # a failed flush of an incomplete shard does not matter
                    self._file.close()
