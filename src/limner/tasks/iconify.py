"""Icon sets in Iconify's JSON format: what is in a file, each icon as a checked SVG document.

`npm pack @iconify-json/NAME` gives a .tgz with `icons.json` (the drawings), `info.json` (title, author, licence) and,
for emoji, `chars.json` (names by code points) and `metadata.json` (names by category). A folder's `icons.json` serves
as well, with the others beside it.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from limner.atomic_io import require_file
from limner.data.sample import Rejected
from limner.data.tar_index import DAMAGED, walk
from limner.errors import UserError
from limner.json_files import parse_json
from limner.tasks.svg import document

MAX_BYTES = 1 << 27  # of one JSON file; the largest of ten sets has 104 MB
MAX_UNPACKED = 1 << 28  # bytes of an archive
_MAX_CHAIN = 16  # of aliases of aliases
#: Licences that ask for a name at most, by SPDX. What is made from others may have to carry their conditions.
_PERMISSIVE = re.compile(r"(Apache-2\.0|MIT(-0)?|ISC|0BSD|BSD-[23]-Clause|CC-BY-\d\.0|CC0-1\.0|OFL-1\.1|Unlicense)")


@dataclass(frozen=True)
class Icon:
    """One drawing. `root` is the name of the drawing that it is a turned or mirrored copy of, or its own."""

    name: str
    root: str
    turns: int = 0
    mirror: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class IconSet:
    """What a file holds. `codes` are code points by name, as "1f468-200d-1f692", and `categories` what its makers file
    a name under; `aliases` are further names of the same picture by its first one; `rejected` counts what is no icon,
    by reason."""

    prefix: str
    title: str
    author: str
    license: str
    source: str
    icons: Mapping[str, Icon]
    aliases: Mapping[str, tuple[str, ...]]
    codes: Mapping[str, str]
    categories: Mapping[str, str]
    rejected: Mapping[str, int]
    _data: Mapping[str, Any] = field(repr=False)

    @property
    def permissive(self) -> bool:
        return _PERMISSIVE.fullmatch(self.license) is not None

    def names(self, icon: Icon) -> tuple[str, ...]:
        """All names of a drawing, its own first."""
        return icon.name, *self.aliases.get(icon.name, ())

    def category(self, icon: Icon) -> str | None:
        """What its makers file it under, by any of its names."""
        return next((told for name in self.names(icon) if (told := self.categories.get(name))), None)

    def svg(self, icon: Icon) -> str:
        """Raises `Rejected` for a drawing that is none, or that may not be drawn."""
        entry = self._data["icons"][icon.root]
        body = entry.get("body")
        if not isinstance(body, str) or not body.strip():
            raise Rejected("icon without a drawing")
        defaults = {"left": 0, "top": 0, "width": 16, "height": 16}
        box = [entry.get(key, self._data.get(key, value)) for key, value in defaults.items()]
        if not all(type(n) in (int, float) and abs(n) <= 1e6 for n in box) or min(box[2:]) <= 0:  # nor nan
            raise Rejected("icon without a size")
        return document(body, (box[0], box[1], box[2], box[3]), icon.turns, icon.mirror)


def read(path: str | Path) -> IconSet:
    """Read `icons.json`, or a .tgz of npm. Raises `UserError` if it is neither."""
    path = Path(path)
    files = _files(path, "icons.json", "info.json", "chars.json", "metadata.json")
    if "icons.json" not in files:
        raise UserError(f"{path} is no icon set: it has no package/icons.json")
    data = _json(path, files, "icons.json")
    if not isinstance(data.get("icons"), dict) or not isinstance(data.get("prefix"), str):
        raise UserError(f'{path} is no icon set: its JSON has no "prefix" and "icons", as Iconify\'s has')
    info = _object(data, "info") or _json(path, files, "info.json")
    author, licence = _object(info, "author"), _object(info, "license")
    prefix = _text(data["prefix"])
    codes = {name: code for code, name in _json(path, files, "chars.json").items() if isinstance(name, str)}
    filed = _object(_json(path, files, "metadata.json"), "categories")
    categories = {
        name: _text(category)
        for category, names in filed.items()
        if isinstance(names, list)
        for name in names
        if isinstance(name, str)
    }
    icons, aliases, rejected = _resolved(data)
    return IconSet(
        prefix, _text(info.get("name")) or prefix, _text(author.get("name")) or "unknown",
        _text(licence.get("spdx")) or "unknown", _text(author.get("url")), icons, aliases, codes, categories,
        rejected, data,
    )  # fmt: skip


def keywords(path: str | Path) -> dict[str, tuple[str, ...]] | None:
    """CLDR's keywords by emoji, of `annotations.json` or the .tgz of `npm pack cldr-annotations-full`; None if the
    file is another."""
    path, name = Path(path), "annotations/en/annotations.json"
    try:
        found: Any = _json(path, _files(path, name), name)
    except UserError:
        return None
    for key in ("annotations", "annotations"):
        found = found.get(key) if isinstance(found, dict) else None
    if not isinstance(found, dict):
        return None
    told = {emoji: entry.get("default") for emoji, entry in found.items() if isinstance(entry, dict)}
    return {emoji: tuple(map(_text, words)) for emoji, words in told.items() if isinstance(words, list)}


def _resolved(data: Mapping[str, Any]) -> tuple[dict[str, Icon], dict[str, tuple[str, ...]], Counter[str]]:
    """Icons by name, each picture once; further names of each; what is left out, by reason."""
    icons: dict[str, Icon] = {}
    names: dict[tuple[str, int, tuple[int, int]], list[str]] = {}
    rejected = Counter[str]()
    entries, aliases = data["icons"], _object(data, "aliases")
    first: dict[str, str] = {}  # the icon that a drawing first came as
    for name in (*entries, *aliases):
        try:
            icon = _follow(name, entries, aliases)
        except Rejected as defect:
            rejected[defect.reason] += 1
            continue
        drawing = repr([entries[icon.root].get(key) for key in ("body", "left", "top", "width", "height")])
        same = first.setdefault(drawing, icon.root)
        icon = Icon(icon.name, same, icon.turns, icon.mirror)
        known = names.setdefault((same, icon.turns, icon.mirror), [])
        known.append(name)
        if len(known) == 1:
            icons[name] = icon
        else:
            rejected["the same picture under another name"] += 1
    return icons, {name: tuple(others) for name, *others in names.values()}, rejected


def _follow(name: str, entries: Mapping[str, Any], aliases: Mapping[str, Any]) -> Icon:
    """An icon, or an alias followed to its icon with what it turns and mirrors on the way. Raises `Rejected`."""
    turns, mirror, at = 0, [1, 1], name
    for _ in range(_MAX_CHAIN):
        entry = entries.get(at, aliases.get(at))
        if not isinstance(entry, dict):
            raise Rejected("icon that is not there")
        if entry.get("hidden"):
            raise Rejected("icon that its set hides")
        turn = entry.get("rotate", 0)
        turns += turn if type(turn) is int else 0
        mirror = [
            side * (-1 if entry.get(flip) is True else 1) for side, flip in zip(mirror, ("hFlip", "vFlip"), strict=True)
        ]
        if at in entries:
            return Icon(name, at, turns % 4, (mirror[0], mirror[1]))
        at = entry.get("parent", "") if isinstance(entry.get("parent"), str) else ""
    raise Rejected("alias of itself")


def _object(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = data.get(key)
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    """A line of text from outside, or nothing."""
    return "".join(c for c in " ".join(str(value).split())[:200] if c.isprintable()) if isinstance(value, str) else ""


def _json(path: Path, files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return the JSON object in one of the files; an empty one if the file is missing."""
    raw = files.get(name, b"{}")
    if len(raw) > MAX_BYTES:
        raise UserError(f"{path} has more than {MAX_BYTES >> 20} MiB in {name}, which is more than an icon set takes")
    try:
        data = parse_json(raw)
    except ValueError as error:
        raise UserError(f"{path} is no icon set: its {name} is not valid JSON ({error})") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} is no icon set: its {name} holds no JSON object")
    return data


def _files(path: Path, *names: str) -> dict[str, bytes]:
    """Return the content of the files that exist, by name, each cut after `MAX_BYTES` and one byte.

    They are members `package/NAME` of an archive; otherwise `path` is the first and the others are beside it.
    """
    require_file(path)
    try:
        if _is_archive(path):
            return _members(path, names)
        files = {name: path.with_name(name) if i else path for i, name in enumerate(names)}
        return {name: _read(file) for name, file in files.items() if file.is_file()}
    except (EOFError, zlib.error, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _is_archive(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _members(path: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    """Return the members `package/NAME` of a .tgz, by name.

    Not with tarfile, which raises ValueError at some pax headers, and keeps every header in memory.
    """
    with gzip.open(path) as packed:
        data = packed.read(MAX_UNPACKED + 1)
    if len(data) > MAX_UNPACKED:
        raise UserError(f"{path} unpacks to more than {MAX_UNPACKED >> 20} MiB, which no icon set takes")
    found: dict[str, bytes] = {}
    for member in walk(lambda size, at: data[at : at + size], len(data)):
        if member.offset == DAMAGED:
            raise UserError(f"{path} cannot be read: its tar is damaged at byte {member.size:,}")
        folder, _, name = member.name.partition("/")
        if folder == "package" and name in names and member.offset >= 0:
            found.setdefault(name, data[member.offset : member.offset + min(member.size, MAX_BYTES + 1)])
    return found


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)
