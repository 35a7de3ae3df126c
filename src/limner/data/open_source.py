"""Open image-caption data on disk.

`open_source` takes a folder, a file or a glob and detects its format:

    pictures with captions   a/b.jpg + a/b.txt, in folders of any depth
    tables                   .jsonl, .csv, .parquet, .arrow: a caption column and a column of image paths
                             (relative to the file) or bytes (raw, base64, or a {"bytes", "path"} struct)
    shards                   00000.tar ... of img2dataset or WebDataset (see `shard_writer.py`)
    Hugging Face data sets   as cloned (tables in folders) or written by `save_to_disk`
    COCO captions, CUB       in the layouts of their authors (see `caption_benchmarks.py`)

The readers do not trust the data (`sanitize.py`, `image_decode.py`): a table may not name files outside its folder.

A sample without a split in its metadata gets one from a word such as "train", "validation" or "test" in the names of
its folders, table or shard, as in Hugging Face. The name of a single file given as the path is ignored.
"""

from __future__ import annotations

import glob as globbing
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeGuard

from limner.data.caption_benchmarks import open_benchmark
from limner.data.sample import MAX_TEXT, Rejected, Sample, Source, fingerprint, parse_captions, select_split
from limner.data.sanitize import MAX_META, normalize_split, read_file, sanitize_metadata, split_from_names
from limner.data.shard_reader import IMAGE_SUFFIXES, ShardReader
from limner.data.shard_writer import INCOMPLETE_MARK
from limner.data.tables import TableSource
from limner.errors import UserError
from limner.json_files import parse_json

__all__ = ["READERS", "FolderSource", "SourceSpec", "open_source"]

TABLES = ("jsonl", "ndjson", "csv", "tsv", "parquet", "arrow")


class FolderSource(Source):
    """A source of pictures with captions in `.txt` files of the same folder and name, a/b.jpg and a/b.txt.

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
        #: True if any picture has a caption.
        self.captioned = any(images and texts for images, texts in stems.values())
        self._root = root
        self._elements: list[tuple[Path | None, Path | None, bool]] = []  # picture, caption, True for a duplicate name
        for images, texts in stems.values() if any(images for images, _ in stems.values()) else ():
            pairs = zip_longest(images, texts[:1])
            self._elements += [(image, text, number > 0) for number, (image, text) in enumerate(pairs)]

    def __len__(self) -> int:
        return len(self._elements)

    def read(self, index: int, picture: bool) -> Sample:
        image, text, is_duplicate = self._elements[index]
        if is_duplicate:
            raise Rejected("duplicate picture name")
        if image is None:
            raise Rejected("missing image")
        captions = parse_captions(read_file(text, "missing caption", MAX_TEXT, "caption too long") if text else None)
        return Sample(read_file(image, "missing image") if picture else b"", captions, self.read_meta(index))

    def read_meta(self, index: int) -> dict[str, Any]:
        image, text, _ = self._elements[index]
        path = image or text or self._root
        split = split_from_names(path.parent.relative_to(self._root).parts)
        return sanitize_metadata({"path": str(path), "split": split})

    def fingerprint(self) -> str:
        return fingerprint([path for image, text, _ in self._elements for path in (image, text) if path])


@dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """Files in or below the folder `root`, with the options of `open_source` for tables."""

    files: Sequence[Path] = ()
    root: Path
    caption: str | None
    image: str | None
    allow_outside: bool

    def splits(self) -> list[str | None]:
        """Return the split of each table or shard, from the words in its name and in its folders below `root`.

        A single file gets None, so that it is always read.
        """
        several = len(self.files) > 1
        return [split_from_names(file.relative_to(self.root).parts) for file in self.files] if several else [None]


def _tables(spec: SourceSpec, splits: Sequence[str | None] | None = None) -> Source:
    return TableSource(spec.files, spec.caption, spec.image, spec.allow_outside, splits or spec.splits())


#: The opener for each set of suffixes; the suffixes of all files must be in one set.
READERS: dict[tuple[str, ...], Callable[[SourceSpec], Source]] = {
    (*IMAGE_SUFFIXES, "txt"): lambda spec: FolderSource(spec.files, spec.root),
    TABLES: _tables,
    ("tar",): lambda spec: ShardReader(spec.files, spec.splits()),
}


def open_source(
    path: str | os.PathLike[str],
    *,
    caption: str | None = None,
    image: str | None = None,
    split: str | None = None,
    allow_outside: bool = False,
) -> Source:
    """Open a folder, a file or a glob of pictures with captions.

    Args:
        caption, image: the columns of a table, if their names are not among the known ones.
        split: keep only the samples of this split ("train", "held-out").
        allow_outside: allow a table to name files outside its folder.

    Raises `UserError` if no sample is found or the columns are not recognized.
    """
    source = _open(os.fspath(path), SourceSpec(root=Path(), caption=caption, image=image, allow_outside=allow_outside))
    if len(source) == 0:
        raise UserError(f"found no pictures in {path}: give a folder of pictures, a table or tar shards")
    if split is None:
        return source
    chosen = select_split(source, split)
    if len(chosen) == 0:
        other = "train" if split == "held-out" else "held-out"
        raise UserError(f'{path} lacks samples of the split "{split}": use "{other}", or run `limner data prepare`')
    return chosen


def _open(path: str, spec: SourceSpec) -> Source:
    if "\0" in path:
        raise UserError("a path cannot hold a zero byte: give a folder, a file or a glob")
    if os.path.isdir(path):
        return _open_folder(replace(spec, root=Path(path)))
    names = [path] if os.path.lexists(path) else _expand_glob(path)
    files = [Path(name) for name in names if not os.path.isdir(name)]
    if not files:
        raise UserError(f"{path} does not exist: give a folder, a file or a glob")
    if len(files) == 1 and not files[0].is_file():
        raise UserError(f"{path} is not a regular file: give a folder, a file or a glob")
    root = Path(os.path.commonpath([file.parent for file in files]))
    suffixes = {file.suffix[1:].lower() for file in files}
    for known, reader in READERS.items():
        if suffixes <= set(known):
            return reader(replace(spec, files=files, root=root))
    raise UserError(
        f"{path} mixes kinds of files or has an unknown kind ({', '.join(sorted(suffixes)[:10])}): "
        f"give pictures, tar shards or one of {', '.join(TABLES)}"
    )


def _expand_glob(pattern: str) -> list[str]:
    """The paths that match a glob, sorted, one per file of a real folder. "**" follows links to folders, even in a
    circle, so a picture could otherwise be trained on under one path and held out under another."""
    real = cache(os.path.realpath)
    unique: dict[tuple[str, str], str] = {}
    for name in sorted(globbing.glob(pattern, recursive=True), key=lambda name: (name.count(os.sep), name)):
        folder, base = os.path.split(name)
        unique.setdefault((real(folder), base), name)
    return sorted(unique.values())


def _open_folder(spec: SourceSpec) -> Source:
    folder = spec.root
    if (folder / INCOMPLETE_MARK).exists():
        return ShardReader([folder / "00000.tar"])
    if saved := _saved_files(folder):
        return _tables(replace(spec, files=list(saved)), list(saved.values()))
    if benchmark := open_benchmark(folder):
        return benchmark
    files: list[Path] = []
    for base, folders, names in os.walk(folder, onerror=_warn_unlisted):
        folders[:] = _visible(folders)
        files += [Path(base, name) for name in _visible(names)]
    tars = [file for file in files if file.suffix.lower() == ".tar"]
    tables = [file for file in files if file.suffix[1:].lower() in TABLES]
    # Files directly in the folder take precedence over those in subfolders.
    tars, tables = ([file for file in group if file.parent == folder] or group for group in (tars, tables))
    pictures = FolderSource(files, folder)
    if tars and (tars[0].parent == folder or not (pictures.captioned or tables)):
        return ShardReader(tars, replace(spec, files=tars).splits())
    # Hugging Face's "imagefolder" has its captions in metadata.jsonl (or .csv, .parquet).
    if tables and not pictures.captioned:
        return _tables(replace(spec, files=tables))
    ignored = len(tars) + len(tables)
    if ignored and pictures.captioned:
        warnings.warn(f"{folder} has captioned pictures: ignoring its {ignored} tables and tars", stacklevel=2)
    return pictures


def _visible(names: Sequence[str]) -> list[str]:
    """Sort names and drop hidden ones, such as thumbnails, notebook checkpoints and trash."""
    return sorted(name for name in names if not name.startswith("."))


def _warn_unlisted(error: OSError) -> None:
    warnings.warn(f"{error.filename} cannot be listed ({error.strerror}): skipping it", stacklevel=2)


def _saved_files(folder: Path) -> dict[Path, str | None]:
    """The Arrow files of a folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote, and their splits."""
    splits = filter(_is_file_name, _json_list(folder / "dataset_dict.json", "splits"))
    files: dict[Path, str | None] = {}
    for split, subfolder in [(None, folder), *((split, folder / split) for split in splits)]:
        for part in _json_list(subfolder / "state.json", "_data_files"):
            name = part.get("filename") if isinstance(part, dict) else None
            if _is_file_name(name) and name.endswith(".arrow"):  # not other .arrow files: `map` writes caches there
                files[subfolder / name] = split and (normalize_split(split) or split)
    return files


def _is_file_name(name: Any) -> TypeGuard[str]:
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and "\0" not in name


def _json_list(path: Path, key: str) -> list[Any]:
    """Return the list under a key of a JSON file; [] if the file or the list is missing or of another type."""
    with suppress(Rejected, ValueError):
        data = parse_json(read_file(path, "none", MAX_META))
        if isinstance(data, dict) and isinstance(data.get(key), list):
            return data[key]
    return []
