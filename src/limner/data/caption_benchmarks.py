"""COCO captions and CUB birds, read from the files that their authors publish.

    COCO   annotations/captions_val2014.json and val2014/*.jpg, for each split there (Chen et al. 2015)
    CUB    images.txt, train_test_split.txt, images/*/*.jpg (Wah et al. 2011), and the captions of Reed et al. (2016),
           one per line, in text_c10/*/*.txt or text/*/*.txt; testclasses.txt, if present, names the held-out classes

A picture has all of its captions. Validation and test pictures are the split "held-out".
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from limner.data.sample import HELD_OUT, MAX_TEXT, TRAIN, Rejected, Sample, Source, fingerprint, parse_captions
from limner.data.sanitize import MAX_META, read_file, sanitize_metadata, split_from_names
from limner.errors import UserError
from limner.json_files import read_mapping

_MAX_ANNOTATION_BYTES = 1 << 28  # the captions of COCO's training set have 92 MB
_CUB_CAPTIONS = ("text_c10", "text")


class _Picture(NamedTuple):
    path: Path
    captions: tuple[str, ...] | Path  # texts, or the file that has one per line
    meta: dict[str, Any]


class CaptionBenchmark(Source):
    """A source of pictures whose files and captions an index names."""

    def __init__(self, index: list[Path], pictures: Iterator[_Picture]) -> None:
        """`index` holds the files that name the pictures."""
        self._index, self._pictures = index, list(pictures)

    def __len__(self) -> int:
        return len(self._pictures)

    def read(self, index: int, picture: bool) -> Sample:
        path, captions, meta = self._pictures[index]
        if isinstance(captions, Path):
            texts = parse_captions(read_file(captions, "missing caption", MAX_TEXT, "caption too long"))
        else:
            texts = parse_captions(captions or None)
        return Sample(read_file(path, "missing image") if picture else b"", texts, sanitize_metadata(meta))

    def read_meta(self, index: int) -> dict[str, Any]:
        return sanitize_metadata(self._pictures[index].meta)

    def fingerprint(self) -> str:
        return fingerprint([*self._index, *(picture.path for picture in self._pictures)])


def open_benchmark(folder: Path) -> CaptionBenchmark | None:
    """Open a folder in the layout of COCO or CUB; None for any other folder. Raises `UserError` for a damaged index."""
    annotations = sorted((folder / "annotations").glob("captions_*.json"))
    if annotations:
        return CaptionBenchmark(annotations, (picture for file in annotations for picture in _coco(folder, file)))
    if (folder / "images.txt").is_file() and (folder / "train_test_split.txt").is_file():
        return CaptionBenchmark([folder / "images.txt", folder / "train_test_split.txt"], _cub(folder))
    return None


def _coco(folder: Path, file: Path) -> Iterator[_Picture]:
    """Yield the pictures of a file of captions whose folder of pictures is present."""
    name = file.stem.removeprefix("captions_")
    if not (folder / name).is_dir():
        return
    content = read_mapping(file, _MAX_ANNOTATION_BYTES)
    captions: dict[int, list[str]] = {}
    try:
        for annotation in content["annotations"]:
            captions.setdefault(int(annotation["image_id"]), []).append(str(annotation["caption"]))
        images = [(int(image["id"]), str(image["file_name"])) for image in content["images"]]
    except (KeyError, TypeError, ValueError, OverflowError):
        raise UserError(f"{file} does not have the format of COCO's captions: use the published file") from None
    for number, picture in images:
        if Path(picture).name != picture:
            raise UserError(f"{file} names the picture {picture[:80]!r} outside its folder: use the published file")
        meta = {"path": picture, "coco_id": number, "split": split_from_names([name])}
        yield _Picture(folder / name / picture, tuple(captions.get(number, ())), meta)


def _cub(folder: Path) -> Iterator[_Picture]:
    """Yield the pictures that images.txt names."""
    texts = next((folder / name for name in _CUB_CAPTIONS if (folder / name).is_dir()), None)
    if texts is None:
        raise UserError(f"{folder} has pictures of CUB without captions: put those of Reed et al. into text_c10")
    train = {number for number, flag in _lines(folder / "train_test_split.txt") if flag == "1"}
    test_classes = folder / "testclasses.txt"
    held_out = set(_read(test_classes).split()) if test_classes.is_file() else None
    for number, name in _lines(folder / "images.txt"):
        kind, _, picture = name.partition("/")
        if kind in ("", ".", "..") or Path(picture).name != picture:
            raise UserError(f"{folder / 'images.txt'} names {name[:80]!r}, not CLASS/PICTURE: use the published file")
        training = number in train if held_out is None else kind not in held_out
        meta = {"path": name, "class": kind, "split": TRAIN if training else HELD_OUT}
        yield _Picture(folder / "images" / name, (texts / name).with_suffix(".txt"), meta)


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the number and the value of each line."""
    for line in _read(file).splitlines():
        number, _, value = line.strip().partition(" ")
        if value:
            yield number, value


def _read(file: Path) -> str:
    try:
        return read_file(file, "cannot be read", MAX_META, "is too large").decode()
    except Rejected as rejected:
        raise UserError(f"{file} {rejected.reason}: use the published file") from None
    except UnicodeDecodeError:
        raise UserError(f"{file} is not UTF-8: use the published file") from None
