"""A pool of processes, or an error if the system lacks shared memory."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

from limner.errors import UserError


def process_pool(workers: int, initializer: Callable[[], None] | None = None) -> ProcessPoolExecutor:
    """Return a pool of spawned processes. Raises `UserError` without shared memory, which semaphores need."""
    context = multiprocessing.get_context("spawn")
    try:
        context.Lock()
    except (OSError, ImportError) as error:
        raise UserError(
            f"no shared memory for several processes ({error}): mount a writable /dev/shm with free space "
            "(for a container, docker run --shm-size 1g)"
        ) from None
    return ProcessPoolExecutor(workers, context, initializer)
