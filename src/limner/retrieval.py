"""Retrieval: training pictures that a prior follows when a caption names their subject.

A prior that can follow a picture (`models/condition.py`) draws a subject in a style that training lacks better after a
picture of this subject than from the caption alone. So a bundle may contain training pictures, as tokens, with their
subjects. The pipelines choose one for a caption, as in retrieval-augmented diffusion models (Blattmann et al. 2022).
The module does not import torch.

Shapes: M pictures, S image positions, K pictures of a subject.
"""

from __future__ import annotations

import io
import lzma
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from limner.atomic_io import atomic_write_bytes
from limner.errors import UserError

__all__ = ["EXAMPLES", "Examples"]

EXAMPLES = "examples.npy.xz"  # in a bundle

_MAX_BYTES = 1 << 28  # decompressed
_MAX_OF_SUBJECT = 64  # pictures that a pipeline compares


class Examples:
    """Training pictures by subject.

    Args:
        tokens: integers [M, S].
        subjects: of the pictures, [M].
    """

    def __init__(self, tokens: np.ndarray, subjects: Sequence[str]) -> None:
        names = {subject: " ".join(_words(subject)) for subject in set(subjects)}
        self.tokens, self.subjects = tokens, [names[subject] for subject in subjects]
        rows = defaultdict[str, list[int]](list)
        for row, subject in enumerate(self.subjects):
            rows[subject].append(row)
        self._rows, self._longest = rows, max((subject.count(" ") + 1 for subject in rows), default=0)

    def __len__(self) -> int:
        return len(self.tokens)

    def about(self, caption: str) -> np.ndarray:
        """Return the tokens of at most 64 pictures of the subject that the caption names, int64 [K, S].

        The subject is the one with the most words, before the first comma if possible, since words of a style can be
        subjects, too ("sun, bold"). Several with equally many words are all meant.
        """
        rows = self._named(caption.partition(",")[0]) or self._named(caption)
        evenly = np.linspace(0, len(rows) - 1, min(len(rows), _MAX_OF_SUBJECT)).astype(int)
        return self.tokens[np.array(rows, int)[evenly]].astype(np.int64)

    def _named(self, text: str) -> list[int]:
        """Return the rows of the longest subjects that a text contains."""
        words = _words(text)
        for length in range(min(self._longest, len(words)), 0, -1):
            parts = dict.fromkeys(" ".join(words[i : i + length]) for i in range(len(words) - length + 1))
            if rows := [row for part in parts for row in self._rows.get(part, ())]:
                return rows
        return []

    def renumbered(self, codes: np.ndarray) -> Examples:
        """Return the pictures whose tokens are all among `codes`, with token `codes[k]` as k; `codes` are sorted."""
        rows = np.flatnonzero(np.isin(self.tokens, codes).all(1))
        tokens = np.searchsorted(codes, self.tokens[rows]).astype(self.tokens.dtype)
        return Examples(tokens, [self.subjects[row] for row in rows])

    def save(self, bundle: Path) -> None:
        """Write two arrays, in numpy's format in xz: tokens, and subjects as lines of text. The file is atomic."""
        buffer = io.BytesIO()
        np.save(buffer, self.tokens)
        np.save(buffer, np.frombuffer("\n".join(self.subjects).encode(), np.uint8))
        atomic_write_bytes(bundle / EXAMPLES, lzma.compress(buffer.getvalue()))

    @classmethod
    def find(cls, bundle: Path, positions: int, vocab: int) -> Examples | None:
        """Read the examples of a bundle, if it has any.

        Raises `UserError` if the file is damaged, or does not fit S `positions` and the vocabulary of image tokens.
        """
        if not (path := bundle / EXAMPLES).exists():
            return None
        try:
            with path.open("rb") as file:
                decompressor = lzma.LZMADecompressor(memlimit=_MAX_BYTES)
                buffer = io.BytesIO(decompressor.decompress(file.read(_MAX_BYTES), _MAX_BYTES))
            if not decompressor.eof:
                raise ValueError(f"more than {_MAX_BYTES >> 20} MiB, or incomplete")
            tokens, text = (np.load(buffer, allow_pickle=False) for _ in range(2))
            subjects = text.tobytes().decode().split("\n")
        except (OSError, EOFError, lzma.LZMAError, ValueError, MemoryError) as error:
            raise UserError(f"{path} is damaged: {error}") from None
        fits = tokens.dtype.kind in "iu" and tokens.shape == (len(subjects), positions)
        if not fits or tokens.min(initial=0) < 0 or tokens.max(initial=0) >= vocab:
            raise UserError(f"{path} does not fit the models of the bundle: train or download the bundle again")
        return cls(tokens, subjects)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
