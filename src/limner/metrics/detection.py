"""Average precision of detections as COCO defines it.

For one class and one least overlap, the detections of all pictures are taken in descending order of their scores. Each
is right if it overlaps a true box of its picture by at least that much, and no better detection has taken that box.
Precision, made non-increasing, is averaged at 101 recalls, 0, 0.01 ... 1. `mAP` is the mean over classes, and for
mAP@[.5:.95] over the ten overlaps 0.5, 0.55 ... 0.95.

A *group* (`iscrowd`) is one box around many objects: detections within it count neither as right nor as wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["BoxSet", "average_precision", "mean_average_precision"]

OVERLAPS = tuple(round(0.5 + 0.05 * i, 2) for i in range(10))
RECALLS = np.linspace(0, 1, 101)
MAX_DETECTIONS = 100  # of a picture that count


class BoxSet(NamedTuple):
    """Boxes of a picture: edges [N, 4], labels [N], and scores [N] of detections, or groups, bool [N], of truth."""

    boxes: np.ndarray
    labels: np.ndarray
    scores: np.ndarray | None = None
    groups: np.ndarray | None = None


def mean_average_precision(detected: Sequence[BoxSet], truth: Sequence[BoxSet]) -> dict[str, float]:
    """Return "mAP@50" and "mAP" (at 0.5 to 0.95) over all classes with a true box, NaN without any; a set for each
    picture."""
    labels = [item.labels if item.groups is None else item.labels[~item.groups] for item in truth]
    classes = np.unique(np.concatenate([np.empty(0, int), *labels])).tolist()
    if not classes:
        return {"mAP@50": float("nan"), "mAP": float("nan")}
    table = np.array([average_precision(detected, truth, label) for label in classes])
    return {"mAP@50": float(table[:, 0].mean()), "mAP": float(table.mean())}


def average_precision(detected: Sequence[BoxSet], truth: Sequence[BoxSet], label: int) -> np.ndarray:
    """Return the average precision of a class at each of `OVERLAPS`, [10]. The class has a true box."""
    scores, outcomes, total = [], [], 0
    for found, real in zip(detected, truth, strict=True):
        is_class = real.labels == label
        groups = np.zeros(len(real.labels), bool) if real.groups is None else real.groups
        total += int((is_class & ~groups).sum())
        assert found.scores is not None
        order = np.argsort(-found.scores, kind="stable")[:MAX_DETECTIONS]
        order = order[found.labels[order] == label]
        iou = _overlaps(found.boxes[order], real.boxes[is_class], groups[is_class])
        outcomes.append(np.stack([_outcomes(iou, groups[is_class], least) for least in OVERLAPS]))
        scores.append(found.scores[order])
    order = np.argsort(-np.concatenate(scores), kind="stable")
    outcome = np.concatenate(outcomes, 1)[:, order]
    return np.array([_area(row[row >= 0], total) for row in outcome])


def _overlaps(boxes: np.ndarray, truth: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return intersections over unions [N, M]; with a group over the area of the detection."""
    low, high = np.maximum(boxes[:, None, :2], truth[None, :, :2]), np.minimum(boxes[:, None, 2:], truth[None, :, 2:])
    shared = (high - low).clip(0).prod(-1)
    area, true_area = (boxes[:, 2:] - boxes[:, :2]).prod(-1)[:, None], (truth[:, 2:] - truth[:, :2]).prod(-1)[None]
    return shared / np.maximum(np.where(groups, area, area + true_area - shared), 1e-9)


def _outcomes(iou: np.ndarray, groups: np.ndarray, least: float) -> np.ndarray:
    """Return 1 for each right detection [N], 0 for a wrong one, -1 for one in a group, given overlaps [N, M] in
    descending order of scores."""
    outcomes, free = np.zeros(len(iou), int), ~groups
    for i, row in enumerate(iou):
        eligible = np.where(free, row, -1)
        if len(row) and eligible.max() >= least:
            outcomes[i], free[eligible.argmax()] = 1, False
        elif (row[groups] >= least).any():
            outcomes[i] = -1
    return outcomes


def _area(right: np.ndarray, total: int) -> float:
    """Return the mean precision at `RECALLS`, given right and wrong detections in order and the number of true ones."""
    hits = np.cumsum(right)
    precision, recall = hits / np.arange(1, len(hits) + 1), hits / total
    precision = np.maximum.accumulate(precision[::-1])[::-1]
    return float(np.append(precision, 0)[np.searchsorted(recall, RECALLS)].mean())
