"""Boxes of detectors: overlap, offsets from default boxes, non-maximum suppression.

A box is its left, top, right and bottom edge, in pixels.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

__all__ = ["box_iou", "decode_boxes", "encode_boxes", "suppress"]

#: Factors on the offsets of center and size, the inverse "variances" of SSD's published code.
CENTER_FACTOR, SIZE_FACTOR = 10.0, 5.0
MAX_LOG_RATIO = math.log(1000 / 16)  # of a decoded side to that of its default box; larger values would overflow


def box_iou(a: Float[Tensor, "... N 4"], b: Float[Tensor, "... M 4"]) -> Float[Tensor, "... N M"]:
    """Return the intersection over union of each pair of boxes; 0 for two empty boxes."""
    left, top, right, bottom = a.unsqueeze(-2).unbind(-1)
    other_left, other_top, other_right, other_bottom = b.unsqueeze(-3).unbind(-1)
    width = (torch.minimum(right, other_right) - torch.maximum(left, other_left)).clamp_min(0)
    overlap = width * (torch.minimum(bottom, other_bottom) - torch.maximum(top, other_top)).clamp_min(0)
    union = (right - left) * (bottom - top) + (other_right - other_left) * (other_bottom - other_top) - overlap
    return overlap / union.clamp_min(1e-9)


def encode_boxes(boxes: Float[Tensor, "... 4"], default_boxes: Float[Tensor, "... 4"]) -> Float[Tensor, "... 4"]:
    """Return the offsets of boxes from default boxes (Liu et al. 2016, Equation 2): of the center in sides of the
    default box, and of the logarithms of the sides."""
    center, size = _center_and_size(boxes)
    default_center, default_size = _center_and_size(default_boxes)
    shift = CENTER_FACTOR * (center - default_center) / default_size
    return torch.cat([shift, SIZE_FACTOR * (size / default_size).log()], -1)


def decode_boxes(offsets: Float[Tensor, "... 4"], default_boxes: Float[Tensor, "... 4"]) -> Float[Tensor, "... 4"]:
    """Return the boxes with these offsets, the inverse of `encode_boxes`."""
    default_center, default_size = _center_and_size(default_boxes)
    center = offsets[..., :2] / CENTER_FACTOR * default_size + default_center
    half = (offsets[..., 2:] / SIZE_FACTOR).clamp_max(MAX_LOG_RATIO).exp() * default_size / 2
    return torch.cat([center - half, center + half], -1)


def suppress(boxes: Float[Tensor, "... N 4"], max_iou: float) -> Bool[Tensor, "... N"]:
    """Return True for boxes that non-maximum suppression keeps, given in descending order of their scores.

    Each kept box removes later boxes that overlap it by more than `max_iou`. Leading dimensions are independent sets.
    """
    overlaps = box_iou(boxes, boxes) > max_iou
    overlaps &= torch.ones_like(overlaps[(0,) * (overlaps.ndim - 2)]).triu(1)  # a box removes only later ones
    keep = torch.ones(boxes.shape[:-1], dtype=torch.bool, device=boxes.device)
    for i in range(boxes.shape[-2]):
        keep &= ~(overlaps[..., i, :] & keep[..., i, None])
    return keep


def _center_and_size(boxes: Tensor) -> tuple[Tensor, Tensor]:
    return (boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]
