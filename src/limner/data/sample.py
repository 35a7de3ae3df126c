"""What a source of training data yields, and what it raises instead.

A `Sample` is an encoded picture, its captions (several phrasings of the same thing) and whatever
else is known about it. A defect is not an error of the program: `Rejected` carries a short, stable
reason, so that a reader can skip the sample and count the reason. Every element of a source is either
kept or rejected for one reason: what goes in equals what is kept plus what is rejected.

A sample belongs to the split that its metadata names. If that is neither "train" nor "held-out", it is never read
(`unread` says so). A sample that names no split is for training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

TRAIN, HELD_OUT = "train", "held-out"
MAX_CAPTION = 4_096  # characters of one phrasing
MAX_CAPTIONS = 256  # phrasings of a sample
MAX_TEXT = 1 << 16  # characters, or bytes, of all of them


@dataclass(frozen=True)
class Sample:
    """An encoded picture (PNG, JPEG, WebP, ...), at least one caption, and metadata."""

    image: bytes
    captions: tuple[str, ...]
    meta: dict[str, Any] = field(default_factory=dict)


class Rejected(Exception):
    """This sample cannot be used. `reason` is short and the same for the same kind of defect."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Source(Protocol):
    """Random access to samples; `source[i]` raises `Rejected` on a defect."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def meta(self, index: int) -> dict[str, Any]:
        """The metadata alone, without reading the picture."""
        ...

    def fingerprint(self) -> str:
        """Changes when files are added, removed or rewritten: names, sizes and times are hashed."""
        ...


class Selection:
    """Some elements of a source, as a source."""

    def __init__(self, source: Source, indices: Sequence[int] | np.ndarray) -> None:
        self.source, self.indices = source, np.asarray(indices, np.int64)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Sample:
        return self.source[int(self.indices[index])]

    def meta(self, index: int) -> dict[str, Any]:
        return self.source.meta(int(self.indices[index]))

    def fingerprint(self) -> str:
        return digest(self.source.fingerprint(), self.indices.tobytes())


def by_split(source: Source) -> dict[str, Selection]:
    """The samples of each split. Samples that name none are for training. So are unreadable ones, which are rejected
    and counted when they are read."""
    indices: dict[str, list[int]] = {}
    for index in range(len(source)):
        try:
            split = source.meta(index).get("split", TRAIN)
        except Rejected:
            split = TRAIN
        indices.setdefault(split, []).append(index)
    return {split: Selection(source, chosen) for split, chosen in indices.items()}


def select_split(source: Source, split: str) -> Selection:
    """The samples of one split ("train", "held-out"); see `by_split`."""
    return by_split(source).get(split) or Selection(source, [])


def unread(splits: Mapping[str, int]) -> str:
    """A sentence on the samples that belong to neither of the two splits, or an empty one; `splits` has the
    number of samples by the name of the split."""
    others = {name: count for name, count in splits.items() if name not in (TRAIN, HELD_OUT)}
    if not others:
        return ""
    names = ", ".join(f'"{name}"' for name in sorted(others)[:3]) + (", ..." if len(others) > 3 else "")
    total = sum(others.values())
    return f'{total:,} samples are never read: their split ({names}) is neither "{TRAIN}" nor "{HELD_OUT}"'


def parse_captions(text: Any) -> tuple[str, ...]:
    """Captions from bytes or text, one phrasing per line, or from a list of phrasings.

    Raises `Rejected`: "missing caption", "caption is not a text", "caption is not UTF-8", "empty caption",
    "caption too long" if no phrasing has at most `MAX_CAPTION` characters, or "too many captions".
    """
    if text is None:
        raise Rejected("missing caption")
    if not isinstance(text, bytes | str | list | tuple):
        raise Rejected("caption is not a text")
    lines: list[str] = []
    for part in text if isinstance(text, list | tuple) else (text,):
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
            lines += [part] if isinstance(text, list | tuple) else part.splitlines()
    if len(lines) > MAX_CAPTIONS or sum(map(len, lines)) > MAX_TEXT:
        raise Rejected("too many captions")
    captions = tuple(line for line in (" ".join(line.split()) for line in lines) if line)
    if not captions:
        raise Rejected("empty caption")
    try:
        "".join(captions).encode()
    except UnicodeEncodeError:  # undecodable bytes that a reader carried through as surrogates
        raise Rejected("caption is not UTF-8") from None
    captions = tuple(caption for caption in captions if len(caption) <= MAX_CAPTION)
    if not captions:
        raise Rejected("caption too long")
    return captions


def digest(*parts: str | bytes) -> str:
    """SHA-256 of the parts, which cannot run into each other, as 64 hexadecimal digits."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="surrogateescape") if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()
