"""Named parts of a step that torch.profiler records as `limner:NAME`. Without a profiler a span takes microseconds."""

from torch.profiler import record_function


def span(name: str) -> record_function:
    """Return a context manager for a part of a step: input, forward, backward, reduction or update."""
    return record_function(f"limner:{name}")
