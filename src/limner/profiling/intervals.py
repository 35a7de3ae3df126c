"""Sets of points in time as sorted, disjoint, half-open intervals: int64 arrays [n, 2] in nanoseconds.

Integers make sums exact: the parts of a step add up to the step.
"""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Bool, Int64

Intervals = Int64[np.ndarray, "n 2"]


def union(pairs: Iterable[tuple[int, int]]) -> Intervals:
    """Return the union of any (start, end) pairs; pairs without length are left out."""
    array = np.array([pair for pair in pairs if pair[0] < pair[1]], np.int64).reshape(-1, 2)
    array = array[np.argsort(array[:, 0], kind="stable")]
    reach = np.maximum.accumulate(array[:, 1]) if len(array) else array[:, 1]
    first = np.append(True, array[1:, 0] > reach[:-1])[: len(array)]  # of a merged interval
    last = np.append(first[1:], True)[: len(array)]
    return np.stack([array[first, 0], reach[last]], 1)


def intersection(a: Intervals, b: Intervals) -> Intervals:
    """Return the points in both sets."""
    cuts, in_a, in_b = _segments(a, b)
    return _merge(cuts, in_a & in_b)


def difference(a: Intervals, b: Intervals) -> Intervals:
    """Return the points in `a` that are not in `b`."""
    cuts, in_a, in_b = _segments(a, b)
    return _merge(cuts, in_a & ~in_b)


def length_before(intervals: Intervals, times: Int64[np.ndarray, " t"]) -> Int64[np.ndarray, " t"]:
    """Return the length of the set before each time. The length between two times is a difference of two values."""
    if not len(intervals):
        return np.zeros(len(times), np.int64)
    lengths = intervals[:, 1] - intervals[:, 0]
    index = np.searchsorted(intervals[:, 0], times, "right") - 1  # the interval that starts last
    whole = np.append(0, np.cumsum(lengths))[np.maximum(index, 0)]
    part = np.clip(times - intervals[index, 0], 0, lengths[index])
    return np.where(index < 0, 0, whole + part)


def length(intervals: Intervals) -> int:
    """Return the length of the set."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())


def _segments(
    a: Intervals, b: Intervals
) -> tuple[Int64[np.ndarray, " m"], Bool[np.ndarray, " m"], Bool[np.ndarray, " m"]]:
    """Return all ends in order, and whether the segment after each is in `a` and in `b`."""
    cuts = np.unique(np.concatenate([a.ravel(), b.ravel()]))
    in_a, in_b = (np.searchsorted(x.ravel(), cuts, "right") % 2 == 1 for x in (a, b))
    return cuts, in_a, in_b


def _merge(cuts: Int64[np.ndarray, " m"], inside: Bool[np.ndarray, " m"]) -> Intervals:
    """Return the intervals of the segments that are inside."""
    change = np.flatnonzero(np.diff(np.concatenate([[False], inside])))
    return cuts[change].reshape(-1, 2)
