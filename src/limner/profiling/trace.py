"""Traces of torch.profiler (Chrome trace events, JSON, perhaps gzipped) as lists of events.

A trace may come from a stranger: its size is bounded before and after decompression, every field is checked, events of
other forms are left out, and text is kept as text. Times are integers in nanoseconds.

    cpu_op, user_annotation, python_function    operators, `record_function` and Python calls on a CPU thread
    kernel, gpu_memcpy, gpu_memset              work of a GPU
    [memory]                                    one allocation or release
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from limner.atomic_io import require_file
from limner.errors import UserError
from limner.json_files import parse_json
from limner.profiling.url import Url, path_or_url
from limner.progress import progress

__all__ = ["Event", "Trace", "TraceStep", "read_trace", "read_traces"]

MAX_BYTES = 1 << 29  # of a trace's JSON
MAX_BRACKETS = 20_000_000  # objects and lists in it, which take more memory than their text
MAX_EVENTS = 2_000_000  # of a trace
MAX_TRACES = 64
MAX_NAME = 300  # characters
MAX_DEPTH = 500  # events inside each other; deeper ones count as being in the last of these
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
MEMORY = "[memory]"
LOADING = ("read", "decode", "augment")  # see spans.py
_CATEGORIES = {"cpu_op", "user_annotation", "python_function", *GPU_WORK}
_STEP = re.compile(r"ProfilerStep#(\d{1,12})")


class Event(NamedTuple):
    """An event of a trace. An allocation starts and ends at one time."""

    name: str
    category: str
    thread: tuple[str, str]  # process and thread; device and stream
    start: int
    end: int
    args: Mapping[str, Any]

    @property
    def duration(self) -> int:
        return self.end - self.start

    def number(self, key: str) -> float:
        """Return a number of the arguments; 0 without one or with one beyond 2**62."""
        value: Any = self.args.get(key)
        return value if type(value) in (int, float) and abs(value) < 1 << 62 else 0


class TraceStep(NamedTuple):
    """A step of training."""

    number: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The events of a rank, by start, and of equal start the longest first.

    Attributes:
        path: the file, or its URL.
        host: name of the machine; "" if the trace lacks it.
        first_step: added to the numbers of the profiler's steps.
        devices: properties of the GPUs.
        loading: calls and nanoseconds of the parts of loading samples, in all threads.
    """

    path: Path | Url
    rank: int
    host: str
    first_step: int
    devices: Sequence[Mapping[str, Any]]
    loading: Mapping[str, tuple[int, int]]
    events: Sequence[Event]

    @cached_property
    def steps(self) -> list[TraceStep]:
        """The profiler's steps; without any, one step of all events."""
        matches = ((_STEP.fullmatch(e.name), e) for e in self.events if e.category == "user_annotation")
        steps = [TraceStep(int(m[1]) + self.first_step, e.start, e.end) for m, e in matches if m and e.duration]
        disjoint = [step for i, step in enumerate(steps) if i == 0 or step.start >= steps[i - 1].end]
        whole = TraceStep(0, self.events[0].start, max(self.events[0].start + 1, *(e.end for e in self.events)))
        return disjoint or [whole]

    @cached_property
    def uses_gpu(self) -> bool:
        return any(e.category == "kernel" for e in self.events)

    @cached_property
    def has_stacks(self) -> bool:
        return any(e.category == "python_function" for e in self.events)

    @cached_property
    def forward_operators(self) -> dict[int, int]:
        """Index of the operator that made an autograd node, by the node's sequence number."""
        numbered = ((int(e.number("Sequence number")), i) for i, e in enumerate(self.events) if e.category == "cpu_op")
        forward = [(n, i) for n, i in numbered if n and not self.events[i].name.startswith("autograd::")]
        return dict(reversed(forward))  # the outermost, which starts first

    @cached_property
    def _parents(self) -> list[int]:
        """Index of the event around each event on its thread, or -1."""
        parents, stacks = [], dict[tuple[str, str], list[int]]()
        for i, event in enumerate(self.events):
            stack = stacks.setdefault(event.thread, [])
            while stack and self.events[stack[-1]].end <= event.start:
                stack.pop()
            parents.append(stack[-1] if stack else -1)
            if event.duration and len(stack) < MAX_DEPTH:
                stack.append(i)
        return parents

    def ancestors(self, index: int) -> Iterator[int]:
        """Yield the indices of the events around an event, from the innermost."""
        parents, events, start = self._parents, self.events, self.events[index].start
        while (index := parents[index]) >= 0:
            if events[index].end > start:  # else it ends inside of one that goes further
                yield index


def read_traces(paths: Sequence[str | Path | Url], shown: bool = False) -> list[Trace]:
    """Read the traces of all ranks, by rank, from files and folders, as paths or fsspec URLs. Show progress if `shown`.

    A URL that ends in .json or .json.gz is a file. Raises `UserError`.
    """
    files: list[Path | Url] = []
    for path in map(path_or_url, paths):
        in_folder = [*path.glob("*.json"), *path.glob("*.json.gz")] if path.is_dir() else [path]
        if not in_folder:
            raise UserError(f"{path} lacks traces: name a folder with files such as rank0.json.gz")
        files += sorted(in_folder, key=str)
    if not files:
        raise UserError("no trace is named: name a folder such as RUN/prior/profile, or files")
    if len(files) > MAX_TRACES:
        raise UserError(f"{len(files)} traces are more than {MAX_TRACES}, the maximum: name fewer")
    traces: list[Trace] = []
    with progress("reading traces", len(files), unit="trace", shown=shown) as bar:
        for path in files:
            traces.append(read_trace(path, len(traces)))
            bar.advance(1)
    traces.sort(key=lambda trace: trace.rank)
    for before, after in pairwise(traces):
        if before.rank == after.rank:
            raise UserError(f"{before.path} and {after.path} are both of rank {after.rank}: name the traces of one run")
    return traces


def read_trace(path: Path | Url, number: int = 0) -> Trace:
    """Read a trace, which has rank `number` unless it names its rank. Raises `UserError`."""
    text = _decompressed(path)
    try:
        document = parse_json(text)
        events = _events(path, document)
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    rank = _mapping(document.get("distributedInfo")).get("rank")
    limner = _mapping(document.get("limner"))
    first, loading = limner.get("first_step"), _mapping(limner.get("loading"))
    devices = document.get("deviceProperties")
    return Trace(
        path=path,
        rank=rank if isinstance(rank, int) and 0 <= rank < 1 << 31 else number,
        host=str(document.get("host_name", ""))[:MAX_NAME],
        first_step=first if isinstance(first, int) and 0 <= first < 1 << 31 else 0,
        devices=[device for device in devices if isinstance(device, dict)] if isinstance(devices, list) else [],
        loading={part: (n[0], n[1]) for part in LOADING if _are_counts(n := loading.get(part))},
        events=events,
    )


def _events(path: Path | Url, document: Any) -> list[Event]:
    """Return the events of a parsed trace, sorted. Raises `UserError`."""
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise UserError(f"{path} is not a trace of torch.profiler: it lacks the list traceEvents")
    if len(document["traceEvents"]) > MAX_EVENTS:
        raise UserError(f"{path} has more than {MAX_EVENTS:,} events, the maximum: record fewer steps")
    base = document.get("baseTimeNanoseconds")
    base = base if isinstance(base, int) and 0 <= base < 1 << 62 else 0  # with 2**51 us below 2**63
    events = [event for raw in document["traceEvents"] if (event := _event(raw, base))]
    if not events:
        raise UserError(f"{path} lacks events of operators: record at least one step")
    return sorted(events, key=lambda event: (event.start, -event.end))


def _decompressed(path: Path | Url) -> bytes:
    """Return the JSON text of a file. Raises `UserError` if it is larger than `MAX_BYTES`."""
    if isinstance(path, Path):
        require_file(path)
    try:
        with path.open("rb") as file:
            compressed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            with gzip.GzipFile(fileobj=file) if compressed else file as content:
                text = content.read(MAX_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if len(text) > MAX_BYTES:
        raise UserError(f"{path} has more than {MAX_BYTES >> 20} MiB of JSON, the maximum: record fewer steps")
    if text.count(b"{") + text.count(b"[") > MAX_BRACKETS:
        raise UserError(
            f"{path} has more than {MAX_BRACKETS:,} JSON objects and lists, the maximum: record fewer steps"
        )
    return text


def _event(raw: Any, base: int) -> Event | None:
    """Return an event whose times are plausible and whose category is known, else None."""
    if not isinstance(raw, dict) or not isinstance(raw.get("name"), str):
        return None
    start: Any = raw.get("ts")
    duration, category = raw.get("dur", 0), str(raw.get("cat"))
    if raw["name"] == MEMORY:
        category, duration = MEMORY, 0
    elif category not in _CATEGORIES or raw.get("ph") != "X":
        return None
    if not _is_time(start) or not _is_time(duration):
        return None
    begin = base + round(start * 1000)
    thread = str(raw.get("pid"))[:MAX_NAME], str(raw.get("tid"))[:MAX_NAME]
    args = _mapping(raw.get("args"))
    return Event(raw["name"][:MAX_NAME], category, thread, begin, begin + round(duration * 1000), args)


def _is_time(value: Any) -> bool:
    """Return True for microseconds that fit."""
    return type(value) in (int, float) and 0 <= value < 1 << 50


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    """Return True for two numbers of events or nanoseconds."""
    return isinstance(values, list) and len(values) == 2 and all(type(n) is int and 0 <= n < 1 << 62 for n in values)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
