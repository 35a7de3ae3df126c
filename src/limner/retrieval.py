"""Retrieval: training pictures that a prior follows when a caption names their subject.

A prior that can follow a picture (`models/condition.py`) draws a subject in a style that training lacks better after a
picture of this subject than from the caption alone. So a bundle may contain training pictures, as tokens, with their
subjects and styles. The pipelines choose one for a caption, as in retrieval-augmented diffusion models (Blattmann et
al. 2022). The module does not import torch.

Shapes: M pictures, S image positions, K pictures of a subject.
"""

from __future__ import annotations

import io
import lzma
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from limner.atomic_io import atomic_write_bytes
from limner.errors import UserError

__all__ = ["EXAMPLES", "Examples"]

EXAMPLES = "examples.npy.xz"  # in a bundle

_MAX_BYTES = 1 << 28  # decompressed
_MOST = 64  # pictures of a subject that a pipeline compares, and subjects that styles are compared by


class Examples:
    """Training pictures by subject and style.

    Args:
        tokens: integers [M, S].
        subjects, styles: of the pictures, [M]. An empty style is unknown.
    """

    def __init__(self, tokens: np.ndarray, subjects: Sequence[str], styles: Sequence[str]) -> None:
        self.tokens, self._subjects, self._styles = tokens, _Phrases(subjects), _Phrases(styles)
        self.subjects, self.styles = self._subjects.phrases, self._styles.phrases

    @classmethod
    def from_captions(cls, tokens: np.ndarray, captions: Sequence[str]) -> Examples:
        """Return pictures [M, S] by their captions: the subject up to the first comma, the style after it."""
        subjects, _, styles = zip(*(caption.partition(",") for caption in captions), strict=True)
        return cls(tokens, subjects, styles)

    def __len__(self) -> int:
        return len(self.tokens)

    def about(self, caption: str) -> np.ndarray:
        """Return the rows of the pictures that a caption asks for, at most 64, int64 [K].

        They have the subject that the caption names: the one with the most words, before the first comma if possible,
        since words of a style can be subjects, too ("sun, bold"). Several with equally many words are all meant. If the
        caption names a style as well, only those of the most similar style remain.
        """
        subject, _, style = caption.partition(",")
        rows = self._subjects.find(subject) or self._subjects.find(caption)
        if rows and (asked := self._styles.find(style) or self._styles.find(caption)):
            of_subject = {self.subjects[row]: row for row in asked}
            distances = {name: self._distance(of_subject, name) for name in {self.styles[row] for row in rows}}
            least = min(distances.values())
            rows = [row for row in rows if distances[self.styles[row]] == least]
        evenly = np.linspace(0, len(rows) - 1, min(len(rows), _MOST)).astype(int)
        return np.array(rows, np.int64)[evenly]

    def name(self, row: int) -> str:
        """Return subject and style of a picture, which name a training icon of `glyphs`: "archive, tabler outline"."""
        return ", ".join(filter(None, (self.subjects[row], self.styles[row])))

    def _distance(self, rows: Mapping[str, int], style: str) -> float:
        """Return the share of tokens in which pictures, one for each subject, differ from those of a style, over at
        most `_MOST` subjects that both have; 1 without one."""
        others = {self.subjects[row]: row for row in self._styles.rows[style]}
        shared = sorted(rows.keys() & others.keys())[:_MOST]
        ours, theirs = (self.tokens[[own[subject] for subject in shared]] for own in (rows, others))
        return float((ours != theirs).mean()) if shared else 1.0

    def select(self, rows: np.ndarray) -> Examples:
        """Return the pictures of the given rows."""
        return Examples(self.tokens[rows], *([of[row] for row in rows] for of in (self.subjects, self.styles)))

    def joined(self, other: Examples) -> Examples:
        """Return these pictures, then the `other` ones."""
        tokens = np.concatenate([self.tokens, other.tokens.astype(self.tokens.dtype)])
        return Examples(tokens, self.subjects + other.subjects, self.styles + other.styles)

    def renumbered(self, codes: np.ndarray) -> Examples:
        """Return the pictures whose tokens are all among `codes`, with token `codes[k]` as k; `codes` are sorted."""
        chosen = self.select(np.flatnonzero(np.isin(self.tokens, codes).all(1)))
        tokens = np.searchsorted(codes, chosen.tokens).astype(self.tokens.dtype)
        return Examples(tokens, chosen.subjects, chosen.styles)

    def save(self, bundle: Path) -> None:
        """Write three arrays atomically, in numpy's format in xz: tokens, then subjects and styles as lines of text."""
        buffer = io.BytesIO()
        np.save(buffer, self.tokens)
        for phrases in (self.subjects, self.styles):
            np.save(buffer, np.frombuffer("\n".join(phrases).encode(), np.uint8))
        atomic_write_bytes(bundle / EXAMPLES, lzma.compress(buffer.getvalue()))

    @classmethod
    def find(cls, bundle: Path, positions: int, vocab: int, adapter: Path | None = None) -> Examples | None:
        """Read the examples of a bundle, if it has any, and those of an adapter of it.

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
            tokens, *texts = (np.load(buffer, allow_pickle=False) for _ in range(3))
            subjects, styles = (text.tobytes().decode().split("\n") for text in texts)
        except (OSError, EOFError, lzma.LZMAError, ValueError, MemoryError) as error:
            raise UserError(f"{path} is damaged: {error}") from None
        fits = tokens.dtype.kind in "iu" and tokens.shape == (len(subjects), positions) == (len(styles), positions)
        if not fits or tokens.min(initial=0) < 0 or tokens.max(initial=0) >= vocab:
            raise UserError(f"{path} does not fit the models of the bundle: train or download the bundle again")
        examples = cls(tokens, subjects, styles)
        learned = cls.find(adapter, positions, vocab) if adapter else None
        return examples.joined(learned) if learned else examples


class _Phrases:
    """Phrases of rows in lower case, and the rows of the longest ones that a text contains."""

    def __init__(self, phrases: Sequence[str]) -> None:
        names = {phrase: " ".join(_words(phrase)) for phrase in set(phrases)}
        self.phrases, self.rows = [names[phrase] for phrase in phrases], defaultdict[str, list[int]](list)
        for row, phrase in enumerate(self.phrases):
            self.rows[phrase].append(row)
        self._longest = max((phrase.count(" ") + 1 for phrase in self.rows), default=0)

    def find(self, text: str) -> list[int]:
        words = _words(text)
        for length in range(min(self._longest, len(words)), 0, -1):
            parts = dict.fromkeys(" ".join(words[i : i + length]) for i in range(len(words) - length + 1))
            if rows := [row for part in parts for row in self.rows.get(part, ())]:
                return rows
        return []


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
