"""All tables of a report, as JSON values. Times are nanoseconds, sizes bytes, shares from 0 to 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from limner.profiling.distributed_view import RankTimes, collective_table, mean_by_rank, steps_by_rank
from limner.profiling.memory_view import memory_by_device
from limner.profiling.operator_view import gpu_summary, kernel_table, mean_operator, operator_table
from limner.profiling.recommendations import recommend
from limner.profiling.timeline_view import timelines
from limner.profiling.trace import Trace

__all__ = ["analyze"]


def analyze(traces: Sequence[Trace]) -> dict[str, Any]:
    """Return the tables and timelines of the traces of all ranks of a run."""
    ranks = [RankTimes(trace) for trace in traces]
    steps = steps_by_rank(ranks)
    tables = {
        "ranks": mean_by_rank(steps),
        "steps": steps,
        "loading": [
            {"rank": trace.rank, "part": part, "calls": calls, "time": time}
            for trace in traces
            for part, (calls, time) in trace.loading.items()
        ],
        "collectives": collective_table(ranks),
        "gpus": [{"rank": trace.rank, **row} for trace in traces if (row := gpu_summary(trace))],
        "operator_time": [mean_operator(trace) for trace in traces],
        "memory": [{"rank": trace.rank, **row} for trace in traces for row in memory_by_device(trace)],
        "operators": [{"rank": trace.rank, **row} for trace in traces for row in operator_table(trace)],
        "kernels": [{"rank": trace.rank, **row} for trace in traces for row in kernel_table(trace)],
    }
    return {"recommendations": recommend(tables), **tables, "timelines": timelines(ranks)}
