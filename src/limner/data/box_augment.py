"""Augmentations of pictures with boxes, as SSD trains (Liu et al. 2016, §2.2 and §3.6).

Zoom out places the picture on a larger canvas: its objects become small. Zoom in crops a part that overlaps an object
by at least a random share. Photometric distortion changes brightness, contrast, saturation and hue. SSD uses all and
flips; SSDlite, whose small backbone does not overfit, only zooms in and flips.

Pictures are uint8 [H, W, 3], boxes float32 [N, 4] in pixels.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from PIL import Image

__all__ = ["BoxAugment", "augment", "distort_colors", "flip", "zoom_in", "zoom_out"]

BoxAugment = Literal["ssd", "ssdlite", "none"]
MEAN_COLOR = (123, 117, 104)  # of ImageNet, the canvas of `zoom_out`
MAX_ZOOM = 4.0
MAX_CANVAS_PIXELS = 1 << 24  # larger pictures are not placed on a canvas
MIN_OVERLAPS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, None)  # None keeps the whole picture
MIN_SIDE = 0.3  # of a crop, as a share of the picture's
CROPS_PER_OVERLAP, MAX_OVERLAPS_TRIED = 40, 50

AnnotatedPicture = tuple[np.ndarray, np.ndarray, np.ndarray]  # picture, boxes, indices of the boxes that remain


def augment(name: BoxAugment, image: np.ndarray, boxes: np.ndarray, rng: np.random.Generator) -> AnnotatedPicture:
    """Apply the augmentation of a detector; return the picture, its boxes, and which boxes remain, int64 [M]."""
    kept = np.arange(len(boxes))
    if name == "none":
        return image, boxes, kept
    if name == "ssd":
        image, boxes = zoom_out(distort_colors(image, rng), boxes, rng)
    image, boxes, kept = zoom_in(image, boxes, rng)
    return *flip(image, boxes, rng), kept


def zoom_out(image: np.ndarray, boxes: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """With probability 1/2, place the picture at random on a canvas of up to four times its sides."""
    h, w = image.shape[:2]
    if rng.random() < 0.5 or h * w > MAX_CANVAS_PIXELS / MAX_ZOOM**2:
        return image, boxes
    ratio = rng.uniform(1, MAX_ZOOM)
    height, width = int(h * ratio), int(w * ratio)
    top, left = int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1))
    canvas = np.empty((height, width, 3), np.uint8)
    canvas[:] = MEAN_COLOR
    canvas[top : top + h, left : left + w] = image
    return canvas, boxes + np.array([left, top, left, top], np.float32)


def zoom_in(image: np.ndarray, boxes: np.ndarray, rng: np.random.Generator) -> AnnotatedPicture:
    """Crop a part with sides of 0.3 to 1 times the picture's and an aspect ratio of 1/2 to 2 that overlaps an object by
    at least a random one of `MIN_OVERLAPS`. Boxes whose center is outside are dropped, the others are cut."""
    h, w = image.shape[:2]
    for _ in range(MAX_OVERLAPS_TRIED if len(boxes) else 0):
        least = MIN_OVERLAPS[rng.integers(len(MIN_OVERLAPS))]
        if least is None:
            break
        for _ in range(CROPS_PER_OVERLAP):
            height, width = (int(n * rng.uniform(MIN_SIDE, 1)) for n in (h, w))
            if not min(height, width) or not 0.5 <= width / height <= 2:
                continue
            top, left = int(rng.integers(h - height + 1)), int(rng.integers(w - width + 1))
            crop = np.array([left, top, left + width, top + height], np.float32)
            center = (boxes[:, :2] + boxes[:, 2:]) / 2
            kept = np.flatnonzero(((center > crop[:2]) & (center < crop[2:])).all(1))
            if not len(kept) or _iou(boxes[kept], crop).max() < least:
                continue
            cut = np.concatenate([np.maximum(boxes[kept, :2], crop[:2]), np.minimum(boxes[kept, 2:], crop[2:])], 1)
            return image[top : top + height, left : left + width], cut - crop[[0, 1, 0, 1]], kept
    return image, boxes, np.arange(len(boxes))


def flip(image: np.ndarray, boxes: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Mirror left and right with probability 1/2."""
    if rng.random() < 0.5:
        return image, boxes
    flipped = boxes.copy()
    flipped[:, [0, 2]] = image.shape[1] - boxes[:, [2, 0]]
    return np.ascontiguousarray(image[:, ::-1]), flipped


def distort_colors(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Change brightness, contrast (before or after the next two), saturation, hue and the order of channels, each with
    probability 1/2."""
    changes = rng.random(6) < 0.5
    brightness, contrast, saturation = rng.uniform(0.875, 1.125), rng.uniform(0.5, 1.5), rng.uniform(0.5, 1.5)
    if changes[0]:
        image = _scale(image, brightness, 0)
    if changes[1] and changes[5]:
        image = _scale(image, contrast, image.mean())
    if changes[2]:
        image = _scale(image, saturation, image.mean(2, keepdims=True))
    if changes[3]:
        hsv = np.array(Image.fromarray(image).convert("HSV"))
        hsv[..., 0] += np.uint8(rng.integers(-12, 13) % 256)  # 0.05 of the circle of 256
        image = np.asarray(Image.fromarray(hsv, "HSV").convert("RGB"))
    if changes[1] and not changes[5]:
        image = _scale(image, contrast, image.mean())
    return image[..., rng.permutation(3)] if changes[4] else image


def _scale(image: np.ndarray, factor: float, center: np.ndarray | float) -> np.ndarray:
    """Scale the differences from `center`."""
    return np.clip((image - np.asarray(center, np.float32)) * np.float32(factor) + center, 0, 255).astype(np.uint8)


def _iou(boxes: np.ndarray, crop: np.ndarray) -> np.ndarray:
    shared = (np.minimum(boxes[:, 2:], crop[2:]) - np.maximum(boxes[:, :2], crop[:2])).clip(0).prod(1)
    return shared / ((boxes[:, 2:] - boxes[:, :2]).prod(1) + (crop[2:] - crop[:2]).prod() - shared)
