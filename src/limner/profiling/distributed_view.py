"""Times of each step on each rank: computation, communication, input, and waiting for other ranks.

A moment of a step counts once, for the first of these that applies: computation, communication (exposed: no
computation hides it), input, other. The four add up to the step exactly. Computation is the GPU's kernels; without a
GPU it is the operators of the CPU. A rank waits in a collective until the last rank enters it, and in a receive until
the data is there.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np

from limner.profiling.intervals import Intervals, difference, intersection, length_before, union
from limner.profiling.operator_view import computes, is_communication
from limner.profiling.trace import MAX_NAME, Event, Trace

PARTS = ("compute", "communication", "input", "other")  # disjoint; their sum is the step
_INPUT_SPANS = ("limner:input", "enumerate(DataLoader)")
_ITEM_BYTES = {
    "float": 4, "double": 8, "half": 2, "bfloat16": 2, "int": 4, "long": 8, "long int": 8, "short": 2, "short int": 2,
    "byte": 1, "char": 1, "unsigned char": 1, "signed char": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True)
class RankTimes:
    """Computation, communication and input of a trace."""

    trace: Trace

    @cached_property
    def compute(self) -> Intervals:
        trace = self.trace
        if trace.uses_gpu:
            return union((e.start, e.end) for e in trace.events if e.category == "kernel" and not is_communication(e))
        operators = union((e.start, e.end) for e in trace.events if computes(e))
        return difference(operators, self._input_spans)

    @cached_property
    def collectives(self) -> list[Event]:
        """Communication, but for the calls that enqueue it."""
        return [e for e in self.trace.events if is_communication(e)]

    @cached_property
    def communication(self) -> Intervals:
        spans = [(e.start, e.end) for e in self.collectives]
        if not self.trace.uses_gpu:  # a CPU may also wait while it enqueues
            spans += [(e.start, e.end) for e in self.trace.events if e.name.startswith("c10d::")]
        return union(spans)

    @cached_property
    def _input_spans(self) -> Intervals:
        return union((e.start, e.end) for e in self.trace.events if e.name.startswith(_INPUT_SPANS))

    def steps(self, waiting: Intervals) -> list[dict[str, int]]:
        """Return the parts of each step, and its overlap and exposed waiting, in nanoseconds."""
        exposed = difference(self.communication, self.compute)
        parts = {
            "compute": self.compute,
            "communication": exposed,
            "input": difference(difference(self._input_spans, self.compute), exposed),
            "overlap": intersection(self.communication, self.compute),
            "waiting": intersection(waiting, exposed),
        }
        starts, ends = (np.array([getattr(s, end) for s in self.trace.steps], np.int64) for end in ("start", "end"))
        lengths = {name: length_before(x, ends) - length_before(x, starts) for name, x in parts.items()}
        rows = []
        for i, step in enumerate(self.trace.steps):
            row = {"rank": self.trace.rank, "step": step.number, "total": step.end - step.start}
            row |= {name: int(values[i]) for name, values in lengths.items()}
            rows.append(row | {"other": row["total"] - sum(row[part] for part in PARTS[:-1])})
        return rows


def steps_by_rank(ranks: Sequence[RankTimes]) -> list[dict[str, int]]:
    """Return the times of each step of each rank."""
    waiting = _waiting(ranks)
    return [row for rank, spans in zip(ranks, waiting, strict=True) for row in rank.steps(union(spans))]


def mean_by_rank(steps: Sequence[Mapping[str, int]]) -> list[dict[str, float]]:
    """Return the mean times of a step by rank, in nanoseconds."""
    by_rank = defaultdict(list)
    for row in steps:
        by_rank[row["rank"]].append(row)
    names = ("total", *PARTS, "overlap", "waiting")
    return [
        {"rank": rank, "steps": len(rows), **{name: sum(row[name] for row in rows) / len(rows) for name in names}}
        for rank, rows in by_rank.items()
    ]


def collective_table(ranks: Sequence[RankTimes]) -> list[dict[str, Any]]:
    """Return the collectives of each rank by kind, type and size, as buckets and compression make them: calls, bytes,
    and time in nanoseconds."""
    rows = []
    for rank in ranks:
        calls, times = Counter[tuple[str, str, int]](), Counter[tuple[str, str, int]]()
        for event in rank.collectives:
            key = collective_name(event), collective_type(event), collective_bytes(event)
            calls[key] += 1
            times[key] += event.duration
        rows += [
            {
                "rank": rank.trace.rank, "name": name, "type": kind, "call_bytes": size, "calls": n, "bytes": n * size,
                "time": times[name, kind, size],
            }
            for (name, kind, size), n in sorted(calls.items(), key=lambda item: -times[item[0]])
        ]  # fmt: skip
    return rows


def collective_name(event: Event) -> str:
    """Return the kind of a collective, such as all_reduce."""
    return str(event.args.get("Collective name") or event.name.removeprefix("gloo:"))


def collective_type(event: Event) -> str:
    """Return the type of a collective's numbers, such as float; "" if the trace lacks it."""
    kinds = event.args.get("Input type")
    kind = event.args.get("dtype") or (kinds[0] if isinstance(kinds, list) and kinds else "")
    return _type_name(kind)[:MAX_NAME]


def collective_bytes(event: Event) -> int:
    """Return the bytes of a collective's larger side; 0 if the trace lacks shapes or the type is unknown."""
    shapes, kinds = event.args.get("Input Dims"), event.args.get("Input type")
    if elements := max(event.number("In msg nelems"), event.number("Out msg nelems")):
        shapes, kinds = [[elements]], [event.args.get("dtype")]
    if not isinstance(shapes, list) or not isinstance(kinds, list):
        return 0
    total = 0.0
    for shape, kind in zip(shapes, kinds, strict=False):
        if isinstance(shape, list) and all(isinstance(n, int | float) and 0 <= n < 2**40 for n in shape):
            total += math.prod(map(float, shape)) * _ITEM_BYTES.get(_type_name(kind), 0)
    return int(total) if total < 2**60 else 0


def _type_name(kind: object) -> str:
    return str(kind).removeprefix("c10::").lower()


def receives(event: Event) -> bool:
    """Return True for point-to-point communication that waits for another rank's data."""
    return "recv" in collective_name(event).lower()


def _waiting(ranks: Sequence[RankTimes]) -> list[list[tuple[int, int]]]:
    """Return by rank the spans in which it waits for another rank.

    The n-th collective of a kind and group in a step is the same one on all ranks; kinds whose numbers differ between
    ranks are left out. Clocks of different machines are aligned by the ends of collectives, which ranks leave together.
    """
    waiting = [[(e.start, e.end) for e in rank.collectives if receives(e)] for rank in ranks]
    by_rank = [_keyed(rank) for rank in ranks]
    shared = set(by_rank[0]).intersection(*by_rank[1:]) if len(ranks) > 1 else set()
    groups = [[keyed[key] for keyed in by_rank] for key in shared]
    matched = [events for group in groups if len({*map(len, group)}) == 1 for events in zip(*group, strict=True)]
    offsets = [0] * len(ranks)
    if matched and len({rank.trace.host for rank in ranks}) > 1:
        offsets = [round(median(events[0].end - events[r].end for events in matched)) for r in range(len(ranks))]
    for events in matched:
        last = max(event.start + offset for event, offset in zip(events, offsets, strict=True))
        for spans, event, offset in zip(waiting, events, offsets, strict=True):
            spans.append((event.start, min(last - offset, event.end)))
    return waiting


def _keyed(rank: RankTimes) -> dict[tuple[int, str, str], list[Event]]:
    """Return the collectives by step, kind and process group. Kernels of a GPU may run after their step: all have 0."""
    keyed, steps = defaultdict(list), rank.trace.steps
    starts = [] if rank.trace.uses_gpu else [step.start for step in steps]
    for event in rank.collectives:
        name, after = collective_name(event), int(np.searchsorted(starts, event.start, "right"))
        if not receives(event) and "send" not in name.lower():
            keyed[steps[after - 1].number if after else 0, name, str(event.args.get("Process Group Name"))].append(
                event
            )
    return keyed
