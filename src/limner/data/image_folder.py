"""Folders of pictures with captions in text files, a/b.jpg and a/b.txt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from limner.data.sample import MAX_TEXT, Rejected, Sample, parse_captions
from limner.data.sanitize import fingerprint, read_file, reject_on_error, sanitize_metadata, split_from_names
from limner.data.shard_reader import IMAGE_SUFFIXES


class FolderSource:
    """A source of pictures with captions in `.txt` files of the same folder and name.

    An element is a picture, or a caption without one. Of several pictures with one name (`a.png`, `a.jpg`) the first
    has the caption. The others are rejected: one could otherwise be trained on and another held out.
    """

    def __init__(self, files: Sequence[Path], root: Path) -> None:
        """The names of folders below `root` may give splits."""
        stems: dict[Path, tuple[list[Path], list[Path]]] = {}
        for file in files:
            kind = file.suffix[1:].lower()
            if kind == "txt" or kind in IMAGE_SUFFIXES:
                stems.setdefault(file.with_suffix(""), ([], []))[kind == "txt"].append(file)
        self._root = root
        self._pairs: list[tuple[Path | None, Path | None]] = []
        self._duplicates: set[int] = set()
        for images, texts in stems.values():
            self._pairs.append((images[0] if images else None, texts[0] if texts else None))
            for image in images[1:]:
                self._duplicates.add(len(self._pairs))
                self._pairs.append((image, None))
        #: True if any picture has a caption.
        self.captioned = any(image and text for image, text in self._pairs)
        if not any(image for image, _ in self._pairs):
            self._pairs = []

    def __len__(self) -> int:
        return len(self._pairs)

    @reject_on_error
    def __getitem__(self, index: int) -> Sample:
        image, text = self._pairs[index]
        if index % len(self) in self._duplicates:
            raise Rejected("duplicate picture name")
        if image is None:
            raise Rejected("missing image")
        captions = parse_captions(read_file(text, "missing caption", MAX_TEXT, "caption too long") if text else None)
        return Sample(read_file(image, "missing image"), captions, self.meta(index))

    @reject_on_error
    def meta(self, index: int) -> dict[str, Any]:
        image, text = self._pairs[index]
        path = image or text or self._root
        split = split_from_names(path.parent.relative_to(self._root).parts)
        return sanitize_metadata({"path": str(path), **({"split": split} if split else {})})

    def fingerprint(self) -> str:
        return fingerprint([path for pair in self._pairs for path in pair if path])
