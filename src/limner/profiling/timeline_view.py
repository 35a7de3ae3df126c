"""The timeline of a rank: events by thread and depth, and the utilization of the device in buckets of 10 ms."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from limner.profiling.distributed_view import RankTimes
from limner.profiling.intervals import length_before
from limner.profiling.operator_view import gpu_busy, is_communication
from limner.profiling.trace import GPU_WORK, MEMORY, Event

BUCKET = 10_000_000  # nanoseconds
MAX_BUCKETS = 2_000  # of a rank; longer recordings have longer buckets
MAX_EVENTS = 24_000  # of a page: the longest
#: Kinds of events, and their colors.
KINDS = {"operator": "#3b82f6", "communication": "#d97706", "span": "#94a3b8", "kernel": "#059669", "copy": "#9333ea"}


def timelines(ranks: Sequence[RankTimes]) -> list[dict[str, Any]]:
    """Return the timeline of each rank from the start of its first step, in microseconds."""
    return [_timeline(rank, MAX_EVENTS // len(ranks)) for rank in ranks]


def _timeline(rank: RankTimes, count: int) -> dict[str, Any]:
    trace = rank.trace
    start, end = trace.steps[0].start, trace.steps[-1].end
    drawn = (
        i
        for i, e in enumerate(trace.events)
        if e.category not in ("python_function", MEMORY) and e.start < end and e.end > start
    )
    longest = sorted(heapq.nlargest(count, drawn, key=lambda i: trace.events[i].duration))
    lanes, names = dict[tuple[str, str], int](), dict[str, int]()
    rows = []
    for i in longest:
        e = trace.events[i]
        depth = sum(trace.events[j].category != "python_function" for j in trace.ancestors(i))
        lane, name = lanes.setdefault(e.thread, len(lanes)), names.setdefault(e.name, len(names))
        rows.append((lane, depth, (e.start - start) / 1e3, e.duration / 1e3, name, _kind(e)))
    bucket = max(BUCKET, -(-(end - start) // MAX_BUCKETS))
    busy = gpu_busy(trace) if trace.uses_gpu else rank.compute
    edges = np.arange(start, end + bucket, bucket)
    return {
        "rank": trace.rank,
        "lanes": [f"process {process}, thread {thread}" for process, thread in lanes],
        "names": list(names),
        "events": rows,
        "bucket": bucket / 1e3,
        "utilization": _shares(np.diff(length_before(busy, edges)), bucket),
        "sm_efficiency": _shares(np.diff(_sm_time_before(trace.events, edges)), bucket) if trace.uses_gpu else [],
        "duration": (end - start) / 1e3,
    }


def _kind(event: Event) -> int:
    """Return the index of an event's kind in `KINDS`."""
    if is_communication(event) or event.name.startswith("c10d::"):
        kind = "communication"
    elif event.category in GPU_WORK:
        kind = "kernel" if event.category == "kernel" else "copy"
    else:
        kind = "span" if event.category == "user_annotation" else "operator"
    return list(KINDS).index(kind)


def _shares(times: np.ndarray, bucket: int) -> list[float]:
    return [round(min(float(time) / bucket, 1.0), 3) for time in times]


def _sm_time_before(events: Sequence[Event], times: np.ndarray) -> np.ndarray:
    """Return the time before each of `times` that an average SM was in use, from the kernels' blocks per SM."""
    kernels = [e for e in events if e.category == "kernel"]
    use = np.array([min(e.number("blocks per SM"), 1.0) for e in kernels])
    ends = np.array([[e.start, e.end] for e in kernels], np.int64)
    points, changes = ends.T.ravel(), np.concatenate([use, -use])
    order = np.argsort(points, kind="stable")
    in_use, points = np.cumsum(changes[order]), points[order]
    totals = np.append(0.0, np.cumsum(in_use[:-1] * np.diff(points)))
    return np.interp(times, points, totals)
