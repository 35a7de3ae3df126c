"""Time of operators and kernels, memory by operator, and who holds the peak.

*Self* leaves out what the operators inside an operator take. Occupancy and blocks per SM are the driver's estimates in
the trace, averaged with the kernels' durations as weights.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from limner.profiling.intervals import Intervals, intersection, length, union
from limner.profiling.trace import GPU_WORK, MEMORY, Event, Trace

# Parts of the names of kernels that use Tensor Cores: instruction shapes and libraries.
_TENSOR_CORE = re.compile(
    r"[ihs](884|1688|8816|16816)|hmma|imma|gmma|wmma|xmma|tensorop|nvjet|flash_(fwd|bwd)|fmha.*sm(80|90|100)",
    re.IGNORECASE,
)
_MATRIX_PRODUCT = re.compile(r"gemm|cutlass|conv|nvjet|flash|fmha|xmma", re.IGNORECASE)
_SOURCE = re.compile(r"([^<>:*?\"|\0]{1,250}\.py)\((\d{1,7})\): ")
_MODULE = "nn.Module: "
_NOT_COMPUTE = ("c10d::", "autograd::", "profiler::")  # namespaces of operators that send, or call other operators
_PHASES = {"limner:": "", "Optimizer.": "update", "enumerate(DataLoader)": "input"}  # by the start of a span's name


@dataclass
class _Sums:
    """A row of the table of operators."""

    calls: int = 0
    self: int = 0
    total: int = 0
    gpu_self: int = 0
    gpu_total: int = 0
    allocations: int = 0
    self_allocated: int = 0
    allocated: int = 0
    self_net: int = 0


def computes(event: Event) -> bool:
    """Return True for operators that compute. Nodes of autograd, which hooks may let wait, contain operators."""
    return event.category == "cpu_op" and "::" in event.name and not event.name.startswith(_NOT_COMPUTE)


def operator_table(trace: Trace) -> list[dict[str, Any]]:
    """Return the operators by self time: calls, times on CPU and GPU in nanoseconds, allocations and bytes.

    "allocated" sums allocations; "self_net" also subtracts releases. "source" is the line of Python that calls most.
    """
    events, sums, lines = trace.events, defaultdict[str, _Sums](_Sums), defaultdict[str, Counter[str]](Counter)
    by_id: dict[int, int] = {}
    for i, event in enumerate(events):
        if event.category not in ("cpu_op", MEMORY):
            continue
        around = _operators_around(trace, i)
        outer = {events[j].name for j in around}
        if event.category == MEMORY:
            size = int(event.number("Bytes"))
            for name in outer:
                sums[name].allocated += max(size, 0)
            if around:
                row = sums[events[around[0]].name]
                row.allocations += size > 0
                row.self_allocated += max(size, 0)
                row.self_net += size
            continue
        by_id.setdefault(int(event.number("External id")), i)
        row = sums[event.name]
        row.calls += 1
        row.self += event.duration
        row.total += 0 if event.name in outer else event.duration
        if around:
            sums[events[around[0]].name].self -= event.duration
        if trace.has_stacks and (line := source_line(trace, i)):
            lines[event.name][line] += 1
    for kernel in events:
        if kernel.category == "kernel" and (i := by_id.get(int(kernel.number("External id")))) is not None:
            sums[events[i].name].gpu_self += kernel.duration
            for name in {events[j].name for j in (i, *_operators_around(trace, i))}:
                sums[name].gpu_total += kernel.duration
    rows = [
        {"name": name, **asdict(row), "source": next(iter(lines[name].most_common(1)), ("", 0))[0]}
        for name, row in sums.items()
    ]
    return sorted(rows, key=lambda row: -max(row["self"], row["gpu_self"]))


def kernel_table(trace: Trace) -> list[dict[str, Any]]:
    """Return the kernels by time: calls, nanoseconds, mean blocks per SM, mean occupancy in percent, Tensor Cores."""
    by_name = defaultdict[str, list[Event]](list)
    for event in trace.events:
        if event.category == "kernel":
            by_name[event.name].append(event)
    rows = [
        {
            "name": name,
            "calls": len(runs),
            "time": sum(e.duration for e in runs),
            "blocks_per_sm": _mean_over_time(runs, "blocks per SM"),
            "occupancy": _mean_over_time(runs, "est. achieved occupancy %"),
            "uses_tensor_cores": bool(_TENSOR_CORE.search(name)),
            "matrix_product": bool(_MATRIX_PRODUCT.search(name)),
        }
        for name, runs in by_name.items()
    ]
    return sorted(rows, key=lambda row: -row["time"])


def gpu_summary(trace: Trace) -> dict[str, float] | None:
    """Return a GPU's utilization and SM efficiency (shares of the steps), mean occupancy in percent, share of kernel
    time on Tensor Cores, mean time of a kernel, and share of the SMs in use during computation; None without a GPU."""
    kernels = [e for e in trace.events if e.category == "kernel"]
    if not kernels:
        return None
    steps, time = union((s.start, s.end) for s in trace.steps), max(sum(e.duration for e in kernels), 1)
    compute = [e for e in kernels if not is_communication(e)]
    in_use = [sum(e.duration * min(e.number("blocks per SM"), 1.0) for e in group) for group in (kernels, compute)]
    return {
        "utilization": length(intersection(gpu_busy(trace), steps)) / length(steps),
        "sm_efficiency": min(in_use[0] / length(steps), 1.0),
        "occupancy": _mean_over_time(kernels, "est. achieved occupancy %"),
        "tensor_cores": sum(e.duration for e in kernels if _TENSOR_CORE.search(e.name)) / time,
        "mean_kernel": time / len(kernels),
        "sms_in_use": in_use[1] / max(sum(e.duration for e in compute), 1),
    }


def gpu_busy(trace: Trace) -> Intervals:
    """Return the time in which the GPU computes, sends or copies."""
    return union((e.start, e.end) for e in trace.events if e.category in GPU_WORK)


def is_communication(event: Event) -> bool:
    """Return True for kernels of NCCL (ncclDevKernel_AllReduce…, ncclKernel_…) and spans of gloo."""
    is_nccl = event.category == "kernel" and "nccl" in event.name[:80].lower()
    return is_nccl or event.name.startswith("gloo:")


def _mean_over_time(kernels: Sequence[Event], key: str) -> float:
    """Return the mean of a number of the kernels, weighted by their durations."""
    return sum(e.duration * e.number(key) for e in kernels) / max(sum(e.duration for e in kernels), 1)


def mean_operator(trace: Trace) -> float:
    """Return the mean time of a kernel; without a GPU that of an operator that no other operator calls."""
    if trace.uses_gpu:
        times = [e.duration for e in trace.events if e.category == "kernel"]
    else:
        operators = {i for i, e in enumerate(trace.events) if computes(e)}
        times = [trace.events[i].duration for i in operators if operators.isdisjoint(trace.ancestors(i))]
    return sum(times) / max(len(times), 1)


def source_line(trace: Trace, index: int) -> str:
    """Return "file:line" of the innermost Python call around an event that is outside of torch; "" without stacks."""
    return next(filter(None, map(_python_line, _around_forward(trace, index))), "")


def module_path(trace: Trace, index: int) -> str:
    """Return the classes of the modules around an event, from the outermost: "Prior_0 > Linear_3"; "" without stacks.
    The profiler numbers the modules of each class."""
    names = (event.name for event in _around_forward(trace, index) if event.category == "python_function")
    return " > ".join(reversed([name.removeprefix(_MODULE) for name in names if name.startswith(_MODULE)]))


def _around_forward(trace: Trace, index: int) -> Iterator[Event]:
    """Yield the events around an event, from the innermost; from a node of autograd on, those around the operator that
    made the node in the forward pass."""
    for i in trace.ancestors(index):
        event = trace.events[i]
        if event.name.startswith("autograd::engine"):
            forward = trace.forward_operators.get(int(event.number("Sequence number")), index)
            yield from (trace.events[j] for j in trace.ancestors(forward))
            return
        yield event


def _python_line(event: Event) -> str:
    """Return "file:line" of a Python call outside of torch, else ""."""
    match = _SOURCE.match(event.name) if event.category == "python_function" else None
    return f"{match[1]}:{match[2]}" if match and not match[1].startswith("torch/") else ""


def phase(trace: Trace, index: int) -> str:
    """Return the part of the step that an event belongs to."""
    around = [trace.events[i] for i in trace.ancestors(index)]
    for event in around:
        for prefix, title in _PHASES.items() if event.category == "user_annotation" else ():
            if event.name.startswith(prefix):
                return title or event.name.removeprefix(prefix)
    if any(event.name.startswith("autograd::engine") for event in around):
        return "backward"
    return "forward" if any(event.category == "cpu_op" for event in around) else "other"


def _operators_around(trace: Trace, index: int) -> list[int]:
    """Return the operators around an event, from the innermost."""
    return [i for i in trace.ancestors(index) if trace.events[i].category == "cpu_op"]
