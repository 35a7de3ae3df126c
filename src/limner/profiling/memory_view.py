"""Memory over time, and the allocations that are live at its peak."""

from __future__ import annotations

from collections import Counter
from typing import Any

from limner.profiling.operator_view import module_path, phase, source_line
from limner.profiling.trace import MEMORY, Event, Trace


def memory_by_device(trace: Trace) -> list[dict[str, Any]]:
    """Return for each device the curve as (nanoseconds, bytes), the peak, and who holds it.

    "before" is memory allocated before the recording, as far as the trace shows it; "before" and the live allocations
    add up to the peak exactly.
    """
    by_device: dict[str, list[tuple[int, Event]]] = {}
    for i, event in enumerate(trace.events):
        if event.category == MEMORY:
            kind, number = int(event.number("Device Type")), int(event.number("Device Id"))
            by_device.setdefault("CPU" if kind == 0 else f"GPU {number}", []).append((i, event))
    return [_device(trace, name, events) for name, events in by_device.items()]


def _device(trace: Trace, name: str, events: list[tuple[int, Event]]) -> dict[str, Any]:
    before = int(events[0][1].number("Total Allocated") - events[0][1].number("Bytes"))
    curve, total, peak_at = [(events[0][1].start, before)], before, -1
    for n, (_, event) in enumerate(events):
        total += int(event.number("Bytes"))
        curve.append((event.start, total))
        if total > curve[peak_at + 1][1]:
            peak_at = n
    live: dict[int, tuple[int, int]] = {}
    for i, event in events[: peak_at + 1]:
        size, address = int(event.number("Bytes")), int(event.number("Addr"))
        if size > 0:
            before += live.get(address, (0, i))[0]  # its release is missing
            live[address] = size, i
        elif address in live:
            del live[address]
        else:  # allocated before the recording
            before += size
    held = Counter[tuple[str, str, str, str]]()
    for size, i in live.values():
        held[_operator(trace, i), phase(trace, i), module_path(trace, i), source_line(trace, i)] += size
    largest, at = max(live.values(), default=(0, 0))
    return {
        "device": name,
        "peak": curve[peak_at + 1][1],
        "before": before,
        "live": sum(size for size, _ in live.values()),
        "reserved": int(max(event.number("Total Reserved") for _, event in events)),
        "peak_phase": phase(trace, events[peak_at][0]) if peak_at >= 0 else "other",
        "largest": {
            "bytes": largest,
            "operator": _operator(trace, at),
            "phase": phase(trace, at),
            "source": source_line(trace, at),
        },
        "holders": [
            {"operator": operator, "phase": part, "module": module, "source": source, "bytes": size}
            for (operator, part, module, source), size in held.most_common()
        ],
        "curve": curve,
    }


def _operator(trace: Trace, index: int) -> str:
    """Return the outermost torch operator around an allocation inside the part of the step."""
    names = [trace.events[i].name for i in trace.ancestors(index) if trace.events[i].category == "cpu_op"]
    return next(
        (name for name in reversed(names) if "::" in name and not name.startswith("autograd::")), "outside of operators"
    )
