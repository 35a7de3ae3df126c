"""What a source of training data yields, and what it raises instead.

A `Sample` is an encoded picture, its captions (several phrasings of the same thing) and whatever
else is known about it. A defect is not an error of the program: `Rejected` carries a short, stable
reason, so that whoever reads can skip the sample and count why.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


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


def select_split(source: Source, split: str) -> Selection:
    """The samples of one split ("train", "held-out"); a sample that names none is for training."""
    return Selection(source, [i for i in range(len(source)) if _split(source, i) == split])


def _split(source: Source, index: int) -> str | None:
    try:
        return source.meta(index).get("split", "train")
    except Rejected:
        return None


def parse_captions(text: bytes | str | Sequence[str] | None) -> tuple[str, ...]:
    """Captions from bytes or text, one phrasing a line, or from a list of phrasings.

    Raises `Rejected`: "missing caption", "caption is not UTF-8" or "empty caption".
    """
    if text is None:
        raise Rejected("missing caption")
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise Rejected("caption is not UTF-8") from None
    lines = text.splitlines() if isinstance(text, str) else [str(line) for line in text]
    captions = tuple(line for line in (" ".join(line.split()) for line in lines) if line)
    if not captions:
        raise Rejected("empty caption")
    for caption in captions:  # undecodable bytes that a reader carried through as surrogates
        if any("\ud800" <= character <= "\udfff" for character in caption):
            raise Rejected("caption is not UTF-8")
    return captions


def digest(*parts: str | bytes) -> str:
    """SHA-256 of the parts, which cannot run into each other, as 64 hexadecimal digits."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="surrogateescape") if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()
