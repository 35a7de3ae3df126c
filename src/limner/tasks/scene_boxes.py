"""Scenes for a detector: pictures with the boxes of their objects, and scenes from detections.

A class is a shape; fill and color are the attributes, and the size follows from the box. The learned reading is much
faster than the scene parser (`scene_reader.py`), but not exact.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import Tensor

from limner.data.coco import collate
from limner.metrics.detection import BoxSet
from limner.models.boxes import suppress
from limner.models.detector import Detections
from limner.tasks.rendering import render
from limner.tasks.scenes import (
    BACKGROUNDS,
    COLORS,
    EXTENT,
    FILLS,
    SHAPES,
    UNITS,
    Scene,
    SceneObject,
    Split,
    sample_dense_scene,
    sample_scene,
)  # fmt: skip

__all__ = ["ATTRIBUTES", "SceneBoxes", "degrade", "scene_from_detections", "true_boxes"]

ATTRIBUTES = len(FILLS), len(COLORS)
DENSE_SHARE = 0.3  # of training scenes
MIN_SCORE = 0.5  # of a detection that counts as an object
MAX_OVERLAP = 0.2  # of two objects, of any shapes
MAX_NOISE, MAX_BLUR = 8.0, 0.8  # in levels and in pixels of 48: drawings have soft edges


def true_boxes(scene: Scene, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return boxes [N, 4] in pixels, labels [N] and attributes [N, 2] of a scene's objects."""
    unit, objects = size / UNITS, scene.objects
    edges = [[item.x, item.y, item.x + EXTENT[item.size], item.y + EXTENT[item.size]] for item in objects]
    labels = [1 + SHAPES.index(item.shape) for item in objects]
    attributes = [(FILLS.index(item.fill), list(COLORS).index(item.color)) for item in objects]
    return (
        np.array(edges, np.float32).reshape(-1, 4) * unit,
        np.array(labels, np.int64),
        np.array(attributes, np.int64).reshape(-1, 2),
    )


class SceneBoxes:
    """New training scenes of one to four objects, and of up to twelve, with blur and noise as in drawings."""

    def __init__(self, size: int, split: Split = "train", count: int = 1 << 24) -> None:
        self.split: Split = split
        self.size, self.count = size, count
        self.classes: list[str] = list(SHAPES)

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: np.ndarray, seeds: np.ndarray) -> dict[str, Tensor]:
        """Return {"pixels", "boxes", "labels", "attributes"} as `MultiBoxLoss` expects them."""
        samples, attributes = [], []
        for seed in seeds.tolist():
            rng = np.random.default_rng(seed)
            dense = rng.random() < DENSE_SHARE
            scene = sample_dense_scene(rng, split=self.split) if dense else sample_scene(rng, split=self.split)
            boxes, labels, values = true_boxes(scene, self.size)
            samples.append((degrade(render(scene, self.size), rng), boxes, labels))
            attributes.append(torch.from_numpy(values))
        batch = collate(samples)
        batch["attributes"] = torch.zeros(*batch["labels"].shape, 2, dtype=torch.int64)
        for row, values in zip(batch["attributes"], attributes, strict=True):
            row[: len(values)] = values
        return batch

    def labeled(self, count: int, seed: int) -> Iterator[tuple[np.ndarray, BoxSet]]:
        """Yield scenes without blur and noise; scene i depends only on the seed and i."""
        for i in range(count):
            scene = sample_scene(np.random.default_rng([seed, i]), split=self.split)
            boxes, labels, _ = true_boxes(scene, self.size)
            yield render(scene, self.size), BoxSet(boxes, labels)


def degrade(picture: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Blur a picture and add noise, both of random strength."""
    radius = rng.uniform(0, MAX_BLUR) * len(picture) / 48
    blurred = np.asarray(Image.fromarray(picture).filter(ImageFilter.GaussianBlur(radius)), np.float32)
    noise = rng.standard_normal(picture.shape, np.float32) * np.float32(rng.uniform(0, MAX_NOISE))
    return (blurred + noise).round().clip(0, 255).astype(np.uint8)


def scene_from_detections(detections: Detections, picture: np.ndarray) -> Scene:
    """Return the scene of detections in a picture, uint8 [S, S, 3]; its background is nearest to most pixels."""
    unit, objects = len(picture) / UNITS, []
    likely = detections.scores >= MIN_SCORE
    likely[likely.clone()] = suppress(detections.boxes[likely], MAX_OVERLAP)
    rows = zip(*(part[likely].tolist() for part in detections), strict=True)
    for box, label, _, (fill, color) in rows:
        side = (box[2] - box[0] + box[3] - box[1]) / 2 / unit
        size = min(EXTENT, key=lambda name: abs(EXTENT[name] - side))
        x, y = ((low + high) / 2 / unit - EXTENT[size] / 2 for low, high in (box[::2], box[1::2]))
        objects.append(
            SceneObject(shape=SHAPES[label - 1], color=list(COLORS)[color], size=size, fill=FILLS[fill], x=x, y=y)
        )
    paints = np.array(list(BACKGROUNDS.values()), np.float32)
    nearest = np.linalg.norm(picture[..., None, :] - paints, axis=-1).argmin(-1)
    background = list(BACKGROUNDS)[np.bincount(nearest.ravel(), minlength=len(paints)).argmax()]
    return Scene(objects=tuple(objects), background=background)
