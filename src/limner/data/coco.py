"""Pictures with boxes in COCO's format, for training and evaluating a detector.

A folder has one JSON file of annotations, `annotations.json` or the only `*.json`, and pictures at the paths that it
names, relative to the folder or to its subfolder `images`. A box is [left, top, width, height] in pixels.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from limner.data import box_augment
from limner.data.area_resize import area_resize
from limner.data.image_decode import decode_image
from limner.data.sample import Rejected, format_reasons
from limner.errors import UserError
from limner.json_files import read_mapping

__all__ = ["AnnotatedPicture", "CocoDataset", "collate", "read_coco"]

MAX_ANNOTATION_BYTES = 1 << 30
MAX_BOXES = 1_000  # of a picture
MAX_SIDE = 1 << 16  # of a picture in pixels
MAX_PICTURE_BYTES = 1 << 28
MAX_CLASSES = 10_000


class AnnotatedPicture(NamedTuple):
    """A picture's file, its size, its boxes [N, 4] as edges in pixels, labels from 1 on [N], and groups, bool [N]."""

    path: Path
    size: tuple[int, int]
    boxes: np.ndarray
    labels: np.ndarray
    groups: np.ndarray


def read_coco(folder: str | Path) -> tuple[list[AnnotatedPicture], list[str]]:
    """Return the pictures and the names of the classes; label i is class i - 1. Raises `UserError` if the annotations
    are missing or malformed."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: name one with COCO's annotations.json and its pictures")
    path = folder / "annotations.json"
    if not path.exists():
        files = sorted(folder.glob("*.json"))
        if len(files) != 1:
            raise UserError(f"{folder} contains {len(files)} JSON files: name COCO's annotations annotations.json")
        path = files[0]
    data = read_mapping(path, MAX_ANNOTATION_BYTES)
    try:
        categories = {int(item["id"]): str(item["name"]) for item in data["categories"]}
        if not 0 < len(categories) <= MAX_CLASSES:
            raise UserError(f"{path} has {len(categories):,} categories: give it 1 to {MAX_CLASSES:,}")
        label_of = {key: i + 1 for i, key in enumerate(sorted(categories))}
        rows: dict[Any, list[tuple[list[float], int, bool]]] = {item["id"]: [] for item in data["images"]}
        for item in data["annotations"]:
            left, top, width, height = (float(value) for value in item["bbox"])
            edges = [left, top, left + width, top + height]
            rows[item["image_id"]].append((edges, label_of[item["category_id"]], bool(item.get("iscrowd"))))
        pictures = [_picture(folder, item, rows[item["id"]]) for item in data["images"]]
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise UserError(f"{path} is not in COCO's format ({type(error).__name__}: {error}): correct it") from None
    if not pictures:
        raise UserError(f"{path} lists no pictures: add some")
    return pictures, [categories[key] for key in sorted(categories)]


def _picture(folder: Path, item: dict[str, Any], rows: Sequence[tuple[list[float], int, bool]]) -> AnnotatedPicture:
    """Return a picture of the list `images`; boxes are cut at its borders, and empty ones dropped."""
    name, width, height = Path(item["file_name"]), int(item["width"]), int(item["height"])
    if name.is_absolute() or ".." in name.parts:
        raise ValueError(f"the file name {str(name)!r} leaves the folder")
    if not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE):
        raise ValueError(f"{str(name)!r} has {width} x {height} pixels")
    if len(rows) > MAX_BOXES:
        raise ValueError(f"{str(name)!r} has more than {MAX_BOXES:,} boxes")
    boxes = np.array([row[0] for row in rows], np.float32).reshape(-1, 4)
    boxes = np.nan_to_num(boxes).clip(0, np.array([width, height, width, height], np.float32))
    good = (boxes[:, 2:] - boxes[:, :2] >= 1).all(1)
    labels, groups = np.array([row[1] for row in rows], np.int64), np.array([row[2] for row in rows], bool)
    path = folder / name
    path = path if path.exists() else folder / "images" / name
    return AnnotatedPicture(path, (width, height), boxes[good], labels[good], groups[good])


class CocoDataset:
    """Training batches of a detector: pictures augmented and resized to `size` x `size` pixels.

    A picture that cannot be read is replaced by the next good one. Groups are left out.
    """

    def __init__(self, pictures: Sequence[AnnotatedPicture], size: int, augment: box_augment.BoxAugment) -> None:
        self.pictures, self.size = pictures, size
        self.augment: box_augment.BoxAugment = augment
        self._defects: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.pictures)

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(os.cpu_count() or 1, "decode")

    def read(self, index: int) -> np.ndarray:
        """Return the pixels uint8 [H, W, 3] in the size that the annotations state. Raises `Rejected`."""
        picture = self.pictures[index]
        try:
            if picture.path.is_file() and picture.path.stat().st_size <= MAX_PICTURE_BYTES:
                image = decode_image(picture.path.read_bytes())
            else:
                raise Rejected("missing or too large")
        except OSError:
            raise Rejected("unreadable file") from None
        if image.shape[1::-1] != picture.size:
            raise Rejected("another size than the annotations state")
        return image

    def _sample(self, index: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        for candidate in ((index + step) % len(self) for step in range(len(self))):
            if candidate in self._defects:
                continue
            try:
                image = self.read(candidate)
            except Rejected as rejected:
                self._defects[candidate] = rejected.reason
                continue
            picture = self.pictures[candidate]
            boxes, labels = picture.boxes[~picture.groups], picture.labels[~picture.groups]
            image, boxes, kept = box_augment.augment(self.augment, image, boxes, np.random.default_rng(seed))
            scale = self.size / np.tile(image.shape[1::-1], 2).astype(np.float32)
            return area_resize(np.ascontiguousarray(image), self.size, self.size), boxes * scale, labels[kept]
        reasons = format_reasons(Counter(self._defects.values()))
        raise UserError(f"none of the {len(self)} pictures can be used ({reasons}): check the data")

    def batch(self, indices: np.ndarray, seeds: np.ndarray) -> dict[str, Tensor]:
        """Return {"pixels", "boxes", "labels"} as `MultiBoxLoss` expects them."""
        return collate(list(self._pool.map(self._sample, indices.tolist(), seeds.tolist())))


def collate(samples: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> dict[str, Tensor]:
    """Return the batch of pictures uint8 [S, S, 3], boxes [N, 4] and labels [N]; label 0 marks padding."""
    most = max(1, *(len(labels) for _, _, labels in samples))
    pixels = np.stack([image.transpose(2, 0, 1) for image, _, _ in samples])
    boxes, labels = np.zeros((len(samples), most, 4), np.float32), np.zeros((len(samples), most), np.int64)
    for i, (_, box, label) in enumerate(samples):
        boxes[i, : len(box)], labels[i, : len(box)] = box, label
    return {"pixels": torch.from_numpy(pixels), "boxes": torch.from_numpy(boxes), "labels": torch.from_numpy(labels)}
