"""Reader of icon sets in Iconify's JSON format: metadata, and each icon as an SVG document.

`npm pack @iconify-json/NAME` gives a .tgz with `icons.json` (the drawings), `info.json` (title, author, license) and,
for emoji, `chars.json` (names by code points) and `metadata.json` (names by category). The path of an unpacked
`icons.json` works too, with the other files in its folder. `npm pack @iconify/json` gives a .tgz with more than 200
sets, one file each.
"""

from __future__ import annotations

import gzip
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from limner.atomic_io import require_file
from limner.data.sample import Rejected
from limner.data.shard_reader import DAMAGED, walk
from limner.errors import UserError
from limner.json_files import parse_json, read_mapping
from limner.tasks.svg import document

MAX_BYTES = 1 << 27  # of one JSON file; the largest of ten sets has 104 MB
MAX_UNPACKED = 1 << 30  # largest unpacked archive, in bytes; all sets together have 465 MB
_MAX_CHAIN = 16  # longest chain of aliases
#: SPDX identifiers of licenses that require attribution at most. Others may restrict derived works.
_PERMISSIVE = re.compile(r"(Apache-2\.0|MIT(-0)?|ISC|0BSD|BSD-[23]-Clause|CC-BY-\d\.0|CC0-1\.0|OFL-1\.1|Unlicense)")


@dataclass(frozen=True)
class Icon:
    """One drawing: `root`, the name of a drawing in the file, mirrored, then turned by `turns` quarters."""

    name: str
    root: str
    turns: int = 0
    mirror: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class IconSet:
    """The contents of an icon set. `codes` maps names to code points such as "1f468-200d-1f692", `categories` names to
    the set's categories, and `aliases` the first name of a picture to its other names. `suffixes` and `prefixes` map
    ends and beginnings of names to titles of variants, such as "fill" to "Fill". `kind` is the catalog's category of
    the set, such as "Logos". `colored` is True for drawings in fixed colors, and `hidden` for sets that the catalog no
    longer shows. `rejected` counts rejected entries by reason."""

    prefix: str
    title: str
    author: str
    license: str
    source: str
    icons: Mapping[str, Icon]
    aliases: Mapping[str, tuple[str, ...]]
    codes: Mapping[str, str]
    categories: Mapping[str, str]
    suffixes: Mapping[str, str]
    prefixes: Mapping[str, str]
    kind: str
    colored: bool
    hidden: bool
    rejected: Mapping[str, int]
    _data: Mapping[str, Any] = field(repr=False)

    @property
    def permissive(self) -> bool:
        return _PERMISSIVE.fullmatch(self.license) is not None

    def names(self, icon: Icon) -> tuple[str, ...]:
        """Return all names of a drawing, `icon.name` first."""
        return icon.name, *self.aliases.get(icon.name, ())

    def category(self, icon: Icon) -> str | None:
        """Return the category of a drawing in its set, by any of its names."""
        return next((category for name in self.names(icon) if (category := self.categories.get(name))), None)

    def svg(self, icon: Icon) -> str:
        """Return a drawing as an SVG document. Raises `Rejected` if empty, too long or without a valid size."""
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
    """Read an `icons.json` or a .tgz of npm. Raises `UserError` for other files."""
    path = Path(path)
    files = _read_files(path, "icons.json", "info.json", "chars.json", "metadata.json")
    if "icons.json" not in files:
        raise UserError(f"{path} is not an icon set: package/icons.json is missing")
    return _icon_set(path, files)


def read_sets(path: str | Path) -> Iterator[IconSet]:
    """Yield the sets in a .tgz of `npm pack @iconify/json`, without damaged ones, or the set that `read` reads.

    A damaged set causes a warning. Raises as `read`.
    """
    path, has_sets = Path(path), False
    for name, data in _members(path) if _is_archive(path) else ():
        if re.fullmatch(r"package/json/[\w-]+\.json", name):
            has_sets = True
            try:
                yield _icon_set(path, {"icons.json": _parse(path, name, data)})
            except UserError as error:
                warnings.warn(f"skipped {name}: {error}", stacklevel=2)
    if not has_sets:
        yield read(path)


def _icon_set(path: Path, files: Mapping[str, Mapping[str, Any]]) -> IconSet:
    """Return a set from the JSON objects of its files, by name. Raises `UserError` for another kind of object."""
    data = files["icons.json"]
    if not isinstance(data.get("icons"), dict) or not isinstance(data.get("prefix"), str):
        raise UserError(f'{path} is not an icon set: its JSON lacks "prefix" or "icons"')
    info = _object(data, "info") or _object(files, "info.json")
    author, license_ = _object(info, "author"), _object(info, "license")
    names_by_category = _object(_object(files, "metadata.json"), "categories") or _object(data, "categories")
    categories = {
        name: _text(category)
        for category, names in names_by_category.items()
        for name in (names if isinstance(names, list) else ())
        if isinstance(name, str)
    }
    icons, aliases, rejected = _resolve_aliases(data)
    suffixes, prefixes = (
        {affix: _text(title) for affix, title in _object(data, key).items()} for key in ("suffixes", "prefixes")
    )
    return IconSet(
        prefix=(prefix := _text(data["prefix"])),
        title=_text(info.get("name")) or prefix,
        author=_text(author.get("name")) or "unknown",
        license=_text(license_.get("spdx")) or "unknown",
        source=_text(author.get("url")),
        icons=icons,
        aliases=aliases,
        codes={name: code for code, name in _object(files, "chars.json").items() if isinstance(name, str)},
        categories=categories,
        suffixes=suffixes,
        prefixes=prefixes,
        kind=_text(info.get("category")),
        colored=info.get("palette") is True,
        hidden=info.get("hidden") is True,
        rejected=rejected,
        _data=data,
    )


def read_keywords(path: str | Path) -> dict[str, tuple[str, ...]] | None:
    """Read CLDR's keywords by emoji from `annotations.json` or the .tgz of `npm pack cldr-annotations-full`; None for
    other files."""
    name = "annotations/en/annotations.json"
    try:
        files = _read_files(Path(path), name)
    except UserError:
        return None
    table = _object(_object(files, name), "annotations").get("annotations")
    if not isinstance(table, dict):
        return None
    keywords = {emoji: entry.get("default") for emoji, entry in table.items() if isinstance(entry, dict)}
    return {emoji: tuple(map(_text, words)) for emoji, words in keywords.items() if isinstance(words, list)}


def _resolve_aliases(data: Mapping[str, Any]) -> tuple[dict[str, Icon], dict[str, tuple[str, ...]], Counter[str]]:
    """Return the icons by name, each picture once; the other names of each; and rejected entries by reason."""
    icons: dict[str, Icon] = {}
    names: dict[tuple[str, int, tuple[int, int]], list[str]] = {}
    rejected = Counter[str]()
    entries, aliases = data["icons"], _object(data, "aliases")
    first: dict[str, str] = {}  # the first icon with each drawing
    for name in (*entries, *aliases):
        try:
            icon = _follow_alias(name, entries, aliases)
        except Rejected as rejection:
            rejected[rejection.reason] += 1
            continue
        drawing = repr([entries[icon.root].get(key) for key in ("body", "left", "top", "width", "height")])
        icon = replace(icon, root=first.setdefault(drawing, icon.root))
        same = names.setdefault((icon.root, icon.turns, icon.mirror), [])
        same.append(name)
        if len(same) == 1:
            icons[name] = icon
        else:
            rejected["duplicate picture"] += 1
    return icons, {name: tuple(others) for name, *others in names.values()}, rejected


def _follow_alias(name: str, entries: Mapping[str, Any], aliases: Mapping[str, Any]) -> Icon:
    """Resolve an icon or alias, and combine turns and mirrors. Raises `Rejected` if hidden, missing or circular."""
    turns, x, y, current = 0, 1, 1, name
    for _ in range(_MAX_CHAIN):
        entry = entries.get(current, aliases.get(current))
        if not isinstance(entry, dict):
            raise Rejected("missing icon")
        if entry.get("hidden"):
            raise Rejected("hidden icon")
        turn = entry.get("rotate", 0)
        turns += turn if type(turn) is int else 0
        x, y = (-side if entry.get(flip) is True else side for side, flip in ((x, "hFlip"), (y, "vFlip")))
        if current in entries:
            return Icon(name, current, turns % 4, (x, y))
        current = entry.get("parent", "") if isinstance(entry.get("parent"), str) else ""
    raise Rejected("circular alias")


def _object(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = data.get(key)
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    """Return a text as one printable line of at most 200 characters; "" for other values."""
    return "".join(c for c in " ".join(str(value).split())[:200] if c.isprintable()) if isinstance(value, str) else ""


def _read_files(path: Path, *names: str) -> dict[str, dict[str, Any]]:
    """Return the JSON objects in the files that exist, by name. Raises `UserError`.

    The files are members `package/NAME` of an archive. Otherwise `path` is the first; the others are in its folder.
    """
    if not _is_archive(path):
        paths = {name: path.with_name(name) if i else path for i, name in enumerate(names)}
        return {name: read_mapping(file, MAX_BYTES) for name, file in paths.items() if file.is_file()}
    members = {f"package/{name}": name for name in names}
    return {members[key]: _parse(path, members[key], data) for key, data in _members(path) if key in members}


def _is_archive(path: Path) -> bool:
    """Return True if a file begins as gzip. Raises `UserError` if it cannot be read."""
    require_file(path)
    try:
        with path.open("rb") as file:
            return file.read(2) == b"\x1f\x8b"
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of the files in a .tgz. Raises `UserError` if it is damaged or too large."""
    try:
        with gzip.open(path) as packed:
            archive = packed.read(MAX_UNPACKED + 1)
    except (EOFError, zlib.error, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if len(archive) > MAX_UNPACKED:
        raise UserError(f"{path} unpacks to more than {MAX_UNPACKED >> 20} MiB, more than icon sets need")
    # tarfile would raise ValueError for some pax headers, and keep every header in memory.
    for member in walk(lambda size, at: archive[at : at + size], len(archive)):
        if member.offset == DAMAGED:
            raise UserError(f"{path} cannot be read: its tar is damaged at byte {member.size:,}")
        if member.offset >= 0:
            yield member.name, archive[member.offset : member.offset + member.size]


def _parse(path: Path, name: str, data: bytes) -> dict[str, Any]:
    """Parse the JSON object in a member of an archive. Raises `UserError`."""
    if len(data) > MAX_BYTES:
        raise UserError(f"{path} has more than {MAX_BYTES >> 20} MiB in {name}, more than an icon set needs")
    try:
        value = parse_json(data)
    except ValueError as error:
        raise UserError(f"{path} is not an icon set: its {name} is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not an icon set: its {name} is not a JSON object")
    return value
