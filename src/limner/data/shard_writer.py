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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from limner.atomic_io import LOCK, atomic_writer, exclusive_lock
from limner.errors import UserError
from limner.json_files import to_json, write_json

SUMMARY, INCOMPLETE_MARK = "dataset.json", "INCOMPLETE"


@dataclass
class Counts:
    """Numbers of samples: kept, rejected by reason, and kept by split."""

    kept: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    splits: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.kept + sum(self.rejected.values())

    def __str__(self) -> str:
        """Format a table: kept first, then the reasons, most frequent first."""
        reasons = sorted(self.rejected.items(), key=lambda item: (-item[1], item[0]))
        rows = [("kept", self.kept)] + [(f"rejected: {reason}", n) for reason, n in reasons]
        width = max(len(name) for name, _ in rows)
        digits = len(f"{self.total:,}")
        return "\n".join(f"{name:<{width}}  {n:>{digits},}  {n / max(1, self.total):6.1%}" for name, n in rows)


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
        self.counts = Counts()
        self._lock, self._shard = ExitStack(), ExitStack()
        self._tar: tarfile.TarFile | None = None

    def write(
        self, image: bytes, captions: Sequence[str], meta: dict[str, Any] | None = None, suffix: str = "png"
    ) -> None:
        """Add a sample. `image` is an encoded picture and `suffix` its file suffix."""
        kept = self.counts.kept
        if self._tar is None or kept % self.per_shard == 0:
            self._shard.close()
            file = self._shard.enter_context(atomic_writer(self.folder / f"{kept // self.per_shard:05d}.tar"))
            tar = tarfile.TarFile(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT)
            self._tar = self._shard.enter_context(tar)
        key = f"{kept:09d}"
        meta = {"key": key, **(meta or {})}
        text, data = "\n".join(captions).encode(), to_json(meta, ensure_ascii=False).encode()
        for name, content in ((suffix, image), ("txt", text), ("json", data)):
            info = tarfile.TarInfo(f"{key}.{name}")
            info.size = len(content)
            self._tar.addfile(info, io.BytesIO(content))
        self.counts.kept += 1
        if "split" in meta:
            self.counts.splits[meta["split"]] += 1

    def summary(self) -> dict[str, Any]:
        """Return the content of `dataset.json`: numbers of samples (all, kept, by reason, by split) and shards."""
        counts = self.counts
        return {
            "count": counts.total,
            "kept": counts.kept,
            "rejected": dict(counts.rejected.most_common()),
            "splits": dict(counts.splits),
            "shards": -(-counts.kept // self.per_shard),
        }

    def __enter__(self) -> ShardWriter:
        with ExitStack() as stack:
            stack.enter_context(exclusive_lock(self.folder))
            present = {path.name for path in self.folder.iterdir() if path.name != LOCK}
            if present and INCOMPLETE_MARK not in present:
                raise UserError(f"{self.folder} is not empty: name a new folder, or delete this one first")
            (self.folder / INCOMPLETE_MARK).touch()
            for name in present:
                if name.endswith((".tar", ".tmp")) or name == SUMMARY:
                    (self.folder / name).unlink()
            self._lock = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            if error[0] is not None:
                with suppress(OSError):  # a failed flush of an incomplete shard does not matter
                    self._shard.__exit__(*error)
                return
            self._shard.close()
            write_json(self.folder / SUMMARY, self.summary(), indent=2, ensure_ascii=False)
            (self.folder / INCOMPLETE_MARK).unlink(missing_ok=True)
