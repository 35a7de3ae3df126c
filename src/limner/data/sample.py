"""Samples of training data, their sources, and the exception for a bad sample.

A defect of a sample is not an error of the program: `Rejected` carries a short, stable reason, so that a reader can
skip the sample and count the reason. Every element of a source is either kept or rejected for one reason: the numbers
of kept and rejected elements add up to the source's length.

The metadata of a sample names its split. Training and evaluation never read splits other than "train" and "held-out";
`describe_unread` reports them. A sample without a split is for training.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

__all__ = [
    "Rejected",
    "Sample",
    "Source",
    "Subset",
    "describe_unread",
    "digest",
    "format_reasons",
    "group_by_split",
    "parse_captions",
    "select_split",
]

TRAIN, HELD_OUT = "train", "held-out"
MAX_CAPTION = 4_096  # characters of one phrasing
MAX_CAPTIONS = 256  # phrasings of a sample
MAX_TEXT = 1 << 16  # characters, or bytes, of all phrasings


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


class Source(Protocol):
    """Random access to samples; `source[i]` raises `Rejected` on a defect."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def captions(self, index: int) -> tuple[str, ...]:
        """Return the captions without opening the picture's file. Raises `Rejected` for every defect but those of
        this file."""
        ...

    def meta(self, index: int) -> dict[str, Any]:
        """Return the metadata without opening the picture's file. Raises `Rejected` if it is unreadable."""
        ...

    def fingerprint(self) -> str:
        """Hash names, sizes and times, to detect added, removed and rewritten files."""
        ...


class Subset:
    """A source of some elements of another source."""

    def __init__(self, source: Source, indices: Sequence[int] | np.ndarray) -> None:
        self.source, self.indices = source, np.asarray(indices, np.int64)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Sample:
        return self.source[int(self.indices[index])]

    def captions(self, index: int) -> tuple[str, ...]:
        return self.source.captions(int(self.indices[index]))

    def meta(self, index: int) -> dict[str, Any]:
        return self.source.meta(int(self.indices[index]))

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
    lines: list[str] = []
    is_list = isinstance(text, list | tuple)
    for part in text if is_list else (text,):
        if len(lines) > MAX_CAPTIONS:
            raise Rejected("too many captions")
        if isinstance(part, bytes | str) and len(part) > MAX_TEXT:
            raise Rejected("caption too long")
        if isinstance(part, bytes):
            try:
                part = part.decode("utf-8-sig")
            except UnicodeDecodeError:
                raise Rejected("caption is not UTF-8") from None
        if isinstance(part, str):
            lines += [part] if is_list else part.splitlines()
    if len(lines) > MAX_CAPTIONS or sum(map(len, lines)) > MAX_TEXT:
        raise Rejected("too many captions")
    captions = tuple(line for line in (" ".join(line.split()) for line in lines) if line)
    if not captions:
        raise Rejected("empty caption")
    try:
        "".join(captions).encode()
    except UnicodeEncodeError:  # a reader decoded invalid bytes to surrogates
        raise Rejected("caption is not UTF-8") from None
    captions = tuple(caption for caption in captions if len(caption) <= MAX_CAPTION)
    if not captions:
        raise Rejected("caption too long")
    return captions


def digest(*parts: str | bytes) -> str:
    """Return the SHA-256 of the parts, each prefixed by its length, as 64 hexadecimal digits."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="surrogateescape") if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()
