"""A folder of SVG files as an icon set: names of files name the icons, and the folder's name the set."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from limner.data.sample import Rejected
from limner.errors import UserError
from limner.tasks.iconify import Icon, IconSet
from limner.tasks.svg import MAX_BODY, without_metadata


@dataclass(frozen=True)
class SVGFolder(IconSet):
    """An icon set whose drawings are files."""

    def svg(self, icon: Icon) -> str:
        """Return the SVG document of an icon. Raises `Rejected` if its file is unusable."""
        try:
            with self._data[icon.root].open("rb") as file:
                data = file.read(MAX_BODY + 1)
        except OSError:
            raise Rejected("file that cannot be read") from None
        if len(data) > MAX_BODY:
            raise Rejected("SVG too long")
        return without_metadata(data.decode(errors="replace"))


def read(path: Path) -> IconSet:
    """Return the SVG files below a folder as a set; of several files with one name, the first.

    Raises `UserError` without such files.
    """
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() == ".svg" and file.is_file())
    if not files:
        raise UserError(f"{path} lacks SVG files: name a folder of icons, or the file of a set")
    by_name = {_name(file): file for file in reversed(files)}
    duplicates = {"another file of the same name": len(files) - len(by_name)} if len(by_name) < len(files) else {}
    title = " ".join(re.sub(r"[\W_]+", " ", path.resolve().name).split()) or "icons"
    return SVGFolder(
        prefix=title, title=title, author="unknown", license="unknown", source="",
        icons={name: Icon(name, name) for name in sorted(by_name)}, aliases={}, codes={}, categories={}, suffixes={},
        prefixes={}, kind="", colored=False, hidden=False, rejected=duplicates, _data=by_name,
    )  # fmt: skip


def _name(file: Path) -> str:
    """Return the name of an icon in words with hyphens: "ArrowLeft.svg" -> "arrow-left"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", file.stem).lower()
