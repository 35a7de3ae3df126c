"""Labeled pictures in a folder for each class, ImageNet's layout.

val/n01440764/a.JPEG        folders named by WordNet id, or
val/golden retriever/1.png  by the class; an underscore stands for a space
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from limner.data.sample import HELD_OUT, Sample, Source, fingerprint
from limner.data.sanitize import read_file, sanitize_metadata
from limner.data.shard_reader import IMAGE_SUFFIXES
from limner.errors import UserError

__all__ = ["ClassFolders"]


class ClassFolders(Source):
    """Pictures of the folders in `root`; the caption of each is the name of its folder. All count as held out.

    Raises `UserError` if `root` lacks folders with pictures, or if one of its folders is empty.
    """

    def __init__(self, root: Path) -> None:
        self.files: list[Path] = []
        for folder in sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")):
            pictures = [p for p in sorted(folder.iterdir()) if p.suffix[1:].lower() in IMAGE_SUFFIXES]
            if not pictures:
                raise UserError(
                    f"the class folder {folder} lacks pictures: remove it, or name the folder of the classes"
                )
            self.files += pictures
        if not self.files:
            raise UserError(f"{root} lacks class folders: put the pictures of each class into a folder of its name")

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int, picture: bool) -> Sample:
        path = self.files[index]
        data = read_file(path, "missing image") if picture else b""
        return Sample(data, (path.parent.name,), self.read_meta(index))

    def read_meta(self, index: int) -> dict[str, Any]:
        return sanitize_metadata({"path": str(self.files[index])}, HELD_OUT)

    def fingerprint(self) -> str:
        return fingerprint(self.files)
