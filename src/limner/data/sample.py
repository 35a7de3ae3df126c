"""Samples of training data, their sources, and the exception for a bad sample.

A defect of a sample is not an error of the program: `Rejected` carries a short, stable reason, so that a reader can
skip the sample and count the reason. Every element of a source is either kept or rejected for one reason: the numbers
of kept and rejected elements add up to the source's length.

The metadata of a sample names its split. Training and evaluation never read splits other than "train" and "held-out";
`describe_unread` reports them. A sample without a split is for training.
"""

from __future__ import annotations

import errno
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from limner.errors import UserError

__all__ = [
    "Rejected", "Sample", "Source", "Subset", "describe_unread", "digest", "fingerprint", "format_reasons",
    "group_by_split", "is_environment_error", "parse_captions", "select_split",
]  # fmt: skip

TRAIN, HELD_OUT = "train", "held-out"
MAX_CAPTION = 4_096  # characters of one phrasing
MAX_CAPTIONS = 256  # phrasings of a sample
MAX_TEXT = 1 << 16  # characters, or bytes, of all phrasings

_T = TypeVar("_T")


@dataclass(frozen=True)
class Sample:
    """An encoded picture (PNG, JPEG, WebP, ...), at least one phrasing of its caption, and metadata."""

    image: bytes
    captions: tuple[str, ...]
    meta: dict[str, Any] = field(default_factory=dict)


class Rejected(Exception):
    """The exception for an unusable sample. `reason` is short and constant for each kind of defect."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def is_environment_error(error: Exception) -> bool:
    """Return True for a fault of the installation or the machine, which is not a sample's defect: a package that cannot
    be imported, too many open files, or any `UserError`."""
    files = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
    return files or isinstance(error, ImportError | UserError)


class Source:
    """Base of the sources: random access to samples. `source[i]`, `captions` and `meta` raise `Rejected` on a defect.

    A subclass implements `__len__`, `read`, `read_meta` and `fingerprint`. Any exception of `read` and `read_meta`
    other than `Rejected` is rejected as "unreadable sample", so that a bad sample never ends a loop over a
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

    def fingerprint(self) -> str:
        """Hash names, sizes and times, to detect added, removed and rewritten files."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> Sample:
        return self._guarded(self.read, index, True)

    def captions(self, index: int) -> tuple[str, ...]:
        """Return the captions without opening the picture's file. Raises `Rejected` for every defect but those of
        this file."""
        return self._guarded(self.read, index, False).captions

    def meta(self, index: int) -> dict[str, Any]:
        """Return the metadata without opening the picture's file. Raises `Rejected` if it is unreadable."""
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


class Subset(Source):
    """A source of some elements of another source."""

    def __init__(self, source: Source, indices: Sequence[int] | np.ndarray) -> None:
        self.source, self.indices = source, np.asarray(indices, np.int64)

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int, picture: bool) -> Sample:
        return self.source.read(int(self.indices[index]), picture)

    def read_meta(self, index: int) -> dict[str, Any]:
        return self.source.read_meta(int(self.indices[index]))

    def fingerprint(self) -> str:
        return digest(self.source.fingerprint(), self.indices.tobytes())


def group_by_split(source: Source) -> dict[str, Subset]:
    """Return the samples of each split. "train" includes samples without a split, and those with unreadable metadata,
    which are rejected and counted when they are read."""
    indices: dict[str, list[int]] = {}
    for index in range(len(source)):
        try:
            split = source.meta(index).get("split", TRAIN)
        except Rejected:
            split = TRAIN
        indices.setdefault(split, []).append(index)
    return {split: Subset(source, chosen) for split, chosen in indices.items()}


def select_split(source: Source, split: str) -> Subset:
    """Return the samples of one split ("train", "held-out"); see `group_by_split`."""
    return group_by_split(source).get(split) or Subset(source, [])


def describe_unread(splits: Mapping[str, int]) -> str:
    """Return a sentence on the samples in splits other than "train" and "held-out", or "" without any; `splits`
    maps the name of a split to its number of samples."""
    others = {name: count for name, count in splits.items() if name not in (TRAIN, HELD_OUT)}
    if not others:
        return ""
    names = ", ".join(f'"{name}"' for name in sorted(others)[:3]) + (", ..." if len(others) > 3 else "")
    total = sum(others.values())
    return f'{total:,} samples are never read: their split ({names}) is neither "{TRAIN}" nor "{HELD_OUT}"'


def format_reasons(rejected: Counter[str]) -> str:
    """Format numbers of rejected samples as "reason: number, ...", most frequent reason first."""
    return ", ".join(f"{reason}: {count}" for reason, count in rejected.most_common())


def parse_captions(text: Any) -> tuple[str, ...]:
    """Parse captions from bytes or text, one phrasing per line, or from a list of phrasings.

    Drops phrasings longer than `MAX_CAPTION`. Raises `Rejected`: "missing caption", "caption is not a text",
    "caption is not UTF-8", "empty caption", "caption too long" if all are, or "too many captions".
    """
    if text is None:
        raise Rejected("missing caption")
    if not isinstance(text, bytes | str | list | tuple):
        raise Rejected("caption is not a text")
    is_list = isinstance(text, list | tuple)
    parts = [part for part in text if isinstance(part, bytes | str)] if is_list else [text]
    if len(parts) > MAX_CAPTIONS:
        raise Rejected("too many captions")
    if any(len(part) > MAX_TEXT for part in parts):
        raise Rejected("caption too long")
    try:
        parts = [part.decode("utf-8-sig") if isinstance(part, bytes) else part for part in parts]
        "".join(parts).encode()  # fails for surrogates, to which a reader decoded invalid bytes
    except UnicodeError:
        raise Rejected("caption is not UTF-8") from None
    lines = parts if is_list else parts[0].splitlines()
    if len(lines) > MAX_CAPTIONS or sum(map(len, lines)) > MAX_TEXT:
        raise Rejected("too many captions")
    captions = [caption for line in lines if (caption := " ".join(line.split()))]
    if not captions:
        raise Rejected("empty caption")
    if not (usable := tuple(caption for caption in captions if len(caption) <= MAX_CAPTION)):
        raise Rejected("caption too long")
    return usable


def digest(*parts: str | bytes) -> str:
    """Return the SHA-256 of the parts, each prefixed by its length, as 64 hexadecimal digits."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="surrogateescape") if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()


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
