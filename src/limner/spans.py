"""Parts of a step and of loading, by name, for recordings. Without a recording they take microseconds.

torch.profiler records the parts of a step as `limner:NAME`. It cannot record the threads that load data together with
allocations, so `listeners` get the times of loading.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Literal

from torch.profiler import record_function

listeners = set[Callable[[str, int], None]]()  # called in any thread with a part of loading and its nanoseconds


def span(name: str) -> record_function:
    """Return a context manager for a part of a step: input, forward, backward, reduction or update."""
    return record_function(f"limner:{name}")


@contextmanager
def loading(part: Literal["read", "decode", "augment"]) -> Iterator[None]:
    """Measure a part of loading a sample for all listeners, unless it fails."""
    start = perf_counter_ns()
    yield
    for listener in list(listeners):
        listener(part, perf_counter_ns() - start)
