"""Average precision as COCO defines it."""

import numpy as np
import pytest

from limner.metrics.detection import BoxSet, average_precision, mean_average_precision


def boxes(*rows):
    return np.array(rows, float).reshape(-1, 4)


def test_a_worked_example():
    """Two true boxes; detections in order: right, wrong, right. Precision is 1 up to recall 0.5, then 2/3."""
    truth = [BoxSet(boxes([0, 0, 10, 10], [20, 0, 30, 10]), np.array([1, 1]))]
    found = [
        BoxSet(boxes([20, 0, 30, 10], [50, 50, 60, 60], [0, 0, 10, 10]), np.array([1, 1, 1]), np.array([0.7, 0.8, 0.9]))
    ]
    assert average_precision(found, truth, 1) == pytest.approx((51 * 1 + 50 * 2 / 3) / 101)


def test_an_overlap_counts_up_to_its_threshold():
    """An overlap of 0.72 is right at 0.5 to 0.7, five of ten thresholds."""
    truth = [BoxSet(boxes([0, 0, 100, 10]), np.array([2]))]
    found = [BoxSet(boxes([0, 0, 72, 10]), np.array([2]), np.array([0.5]))]
    assert mean_average_precision(found, truth) == pytest.approx({"mAP@50": 1, "mAP": 0.5})


def test_a_second_detection_of_an_object_is_wrong():
    truth = [BoxSet(boxes([0, 0, 10, 10], [20, 0, 30, 10]), np.array([1, 1]))]
    found = [BoxSet(boxes([0, 0, 10, 10], [0, 0, 10, 9.9]), np.array([1, 1]), np.array([0.9, 0.8]))]
    assert average_precision(found, truth, 1)[0] == pytest.approx(51 / 101)


def test_detections_in_a_group_do_not_count():
    group = np.array([False, True])
    truth = [BoxSet(boxes([0, 0, 10, 10], [20, 20, 90, 90]), np.array([1, 1]), None, group)]
    found = [BoxSet(boxes([30, 30, 40, 40], [0, 0, 10, 10]), np.array([1, 1]), np.array([0.9, 0.8]))]
    assert mean_average_precision(found, truth)["mAP"] == pytest.approx(1)


def test_pictures_without_objects_or_detections():
    empty = BoxSet(boxes(), np.zeros(0, int), np.zeros(0))
    one = BoxSet(boxes([0, 0, 10, 10]), np.array([1]))
    assert mean_average_precision([empty], [one]) == {"mAP@50": 0, "mAP": 0}
    assert np.isnan(mean_average_precision([empty], [empty])["mAP"])
    false = BoxSet(one.boxes, one.labels, np.array([0.9]))
    # A wrong detection in an empty picture, before the right one, halves the precision.
    later = BoxSet(one.boxes, one.labels, np.array([0.5]))
    assert mean_average_precision([false, later], [empty, one])["mAP@50"] == pytest.approx(0.5)


def slow_average_precision(found, truth, label, least):
    """The definition, one detection at a time."""
    rows = [
        (score, i, box)
        for i, item in enumerate(found)
        for box, own, score in zip(item.boxes, item.labels, item.scores, strict=True)
        if own == label
    ]
    free = [[box for box, own in zip(item.boxes, item.labels, strict=True) if own == label] for item in truth]
    total, right = sum(map(len, free)), []
    for _, i, (a, b, c, d) in sorted(rows, key=lambda row: -row[0]):
        best, at = least, None
        for j, (e, f, g, h) in enumerate(free[i]):
            shared = max(0, min(c, g) - max(a, e)) * max(0, min(d, h) - max(b, f))
            iou = shared / ((c - a) * (d - b) + (g - e) * (h - f) - shared)
            if iou >= best:
                best, at = iou, j
        right.append(at is not None)
        if at is not None:
            free[i].pop(at)
    points = [(sum(right[: n + 1]) / total, sum(right[: n + 1]) / (n + 1)) for n in range(len(right))]
    return np.mean([max([p for r, p in points if r >= recall - 1e-12], default=0) for recall in np.arange(101) / 100])


def test_the_fast_form_equals_the_slow_one():
    rng = np.random.default_rng(1)

    def random_boxes(n):
        low = rng.uniform(0, 40, (n, 2))
        return np.concatenate([low, low + rng.uniform(5, 20, (n, 2))], 1)

    truth = [BoxSet(random_boxes(n), rng.integers(1, 3, n)) for n in (4, 0, 7, 5)]
    found = []
    for item in truth:
        near = np.concatenate([item.boxes + rng.normal(0, 1.5, item.boxes.shape), random_boxes(3)])
        labels = np.concatenate([item.labels, rng.integers(1, 3, 3)])
        found.append(BoxSet(near, labels, rng.random(len(near))))
    for label in (1, 2):
        fast = average_precision(found, truth, label)
        for least, value in zip(np.arange(0.5, 1, 0.05), fast, strict=True):
            assert value == pytest.approx(slow_average_precision(found, truth, label, least))
    assert 0 < mean_average_precision(found, truth)["mAP"] < mean_average_precision(found, truth)["mAP@50"] < 1
