"""Traces written by hand in the form that torch.profiler documents: of CPUs with gloo, and of GPUs with NCCL."""

import json
from pathlib import Path
from typing import Any

MS = 1000.0  # microseconds


class TraceFile:
    """Events of a rank; times in milliseconds."""

    def __init__(self, rank: int = 0, host: str = "a") -> None:
        self.rank, self.host, self.events, self.total = rank, host, [], 0
        self.devices: list[dict[str, Any]] = []
        self.loading: Any = {}

    def add(self, name: str, category: str, start: float, end: float, tid: Any = 1, **args: Any) -> None:
        times = {"ts": round(start * MS, 3), "dur": round((end - start) * MS, 3)}
        self.events.append({"ph": "X", "cat": category, "name": name, "pid": 7, "tid": tid, **times, "args": args})

    def op(self, name: str, start: float, end: float, tid: int = 1, **args: Any) -> None:
        self.add(name, "cpu_op", start, end, tid, **args)

    def span(self, name: str, start: float, end: float, tid: int = 1, **args: Any) -> None:
        self.add(name, "user_annotation", start, end, tid, **args)

    def kernel(
        self, name: str, start: float, end: float, blocks: float = 1.0, occupancy: float = 50, **args: Any
    ) -> None:
        estimates = {"blocks per SM": blocks, "est. achieved occupancy %": occupancy}
        self.add(name, "kernel", start, end, "stream 7", **estimates, **args)

    def all_reduce(self, start: float, end: float, elements: int = 1000, tid: int = 2) -> None:
        self.span("gloo:all_reduce", start, end, tid, **{"Input Dims": [[elements]], "Input type": ["float"]})

    def allocate(self, at: float, size: int, address: int, device: int = 0) -> None:
        """Allocate bytes, or release them if `size` is negative."""
        self.total += size
        args = {
            "Total Allocated": self.total,
            "Bytes": size,
            "Addr": address,
            "Device Type": device,
            "Device Id": device - 1,
        }
        event = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 7, "tid": 1, "ts": at * MS}
        self.events.append({**event, "args": args})

    def save(self, folder: Path) -> Path:
        path = folder / f"rank{self.rank}.json"
        document = {
            "schemaVersion": 1, "deviceProperties": self.devices, "host_name": self.host,
            "distributedInfo": {"rank": self.rank, "world_size": 2}, "limner": {"loading": self.loading},
            "traceEvents": self.events,
        }  # fmt: skip
        path.write_text(json.dumps(document))
        return path


def straggler(rank: int, at: float = 0.0, host: str = "a") -> TraceFile:
    """Two steps of 100 ms: rank 1 computes 84 ms and rank 0 20 ms, then they average gradients until 95 ms."""
    trace = TraceFile(rank, host)
    for step in range(2):
        start, work = at + 100.0 * step, 84.0 if rank else 20.0
        trace.span(f"ProfilerStep#{step + 1}", start, start + 100)
        trace.span("limner:input", start, start + 2)
        trace.op("aten::mm", start + 2, start + 2 + work)
        trace.op("c10d::allreduce_", start + 2 + work, start + 2 + work + 0.5)
        trace.all_reduce(start + 3 + work, start + 95)
    return trace


def cuda(rank: int = 0) -> TraceFile:
    """A step of 100 ms on a GPU of 100 SMs: kernels for 60 ms, NCCL for 30 ms of which 10 ms are hidden."""
    trace = TraceFile(rank)
    trace.devices = [{"id": 0, "name": "NVIDIA H100", "numSms": 100}]
    trace.span("ProfilerStep#1", 0, 100)
    trace.span("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 5)
    trace.add("nn/model.py(12): forward", "python_function", 5, 9)
    trace.op("aten::linear", 6, 8, **{"External id": 11, "Sequence number": 3})
    trace.op("aten::mm", 6.2, 7.8, **{"External id": 12, "Sequence number": 4})
    trace.allocate(6.5, 600, 1, device=1)
    trace.allocate(6.6, 400, 2, device=1)
    trace.allocate(50, -600, 1, device=1)
    trace.add("Memcpy HtoD (Pageable -> Device)", "gpu_memcpy", 8, 10, "stream 7")
    trace.kernel("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", 10, 40, 2.0, 25, **{"External id": 12})
    trace.kernel("elementwise_kernel", 40, 50, 0.5, 75, **{"External id": 11})
    trace.kernel("elementwise_kernel", 50, 70, 0.2, 15, **{"External id": 11})
    sizes = {"Collective name": "allreduce", "In msg nelems": 500, "dtype": "BFloat16", "Process Group Name": "0"}
    trace.add("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "kernel", 60, 90, "stream 20", **sizes)
    return trace
