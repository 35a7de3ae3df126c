"""A thread that draws the requests of a server's clients with one engine.

Coroutines submit requests; the thread steps the engine while there are jobs. Requests join and leave between steps. If
a step fails, its clients get an error and a new engine starts.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from limner.pipeline import TextToImage
from limner.sampling.engine import Job, Request
from limner.serve.answers import Busy

__all__ = ["Partial", "Worker"]

_RATE_SHARE = 0.2  # of the running mean of seconds per candidate


@dataclass(frozen=True)
class Partial:
    """The top rows of unfinished candidates: pictures uint8 [n, 3, current height, W]."""

    candidates: range
    pictures: Tensor


@dataclass(eq=False)
class _Ticket:
    request: Request
    put: Callable[[Partial | Job | Exception], object]  # hands an event to the coroutine
    job: Job | None = None
    cancelled: bool = False


class Worker:
    """Draws for many clients.

    Args:
        pipe: nothing else may draw with it.
        max_requests: requests that may wait and run at the same time.
    """

    def __init__(self, pipe: TextToImage, max_requests: int = 64) -> None:
        self.pipe, self.max_requests = pipe, max_requests
        self.open: list[_Ticket] = []  # waiting and running; the event loop's thread changes it
        self.seconds_per_candidate = 0.5  # until the first one is measured
        self._inbox: queue.SimpleQueue[_Ticket | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="limner-worker")
        self._thread.start()

    @property
    def waiting_candidates(self) -> int:
        """Number of candidates of all open requests."""
        return sum(ticket.request.candidates for ticket in self.open)

    def expected_seconds(self) -> float:
        """Seconds until a request that comes now is drawn, by the recent pace."""
        return max(1.0, self.seconds_per_candidate * self.waiting_candidates)

    def require_room(self) -> None:
        """Raise `Busy` if `max_requests` are open."""
        if len(self.open) >= self.max_requests:
            raise Busy(self.expected_seconds())

    async def draw(self, request: Request) -> AsyncGenerator[Partial | Job]:
        """Yield partial pictures, then the finished job. Closing the iterator cancels the request.

        Raises `Busy`, and `UserError` or another exception if drawing failed.
        """
        self.require_room()
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Any]()
        ticket = _Ticket(request, lambda event: loop.call_soon_threadsafe(events.put_nowait, event))
        self.open.append(ticket)
        self._inbox.put(ticket)
        try:
            while not isinstance(event := await events.get(), Exception):
                yield event
                if isinstance(event, Job):
                    return
            raise event
        finally:
            self.open.remove(ticket)
            ticket.cancelled = True
            self._inbox.put(None)  # wakes the thread, which drops the cancelled job

    def close(self) -> None:
        """End the thread after the present step."""
        self.max_requests = 0
        self._inbox.put(None)

    def _run(self) -> None:
        running: list[_Ticket] = []
        while self.max_requests:
            running += self._received(block=not running)
            try:
                running = self._advance(running)
            except Exception as error:  # the engine's state is unknown: start a new one
                for ticket in running:
                    ticket.put(error)
                running, self.pipe = [], self.pipe.to(self.pipe.device)

    def _received(self, block: bool) -> list[_Ticket]:
        """Return new tickets; wait for one if `block`."""
        received = []
        while True:
            try:
                ticket = self._inbox.get(block and not received)
            except queue.Empty:
                return received
            block = False
            if ticket:
                received.append(ticket)

    def _advance(self, running: list[_Ticket]) -> list[_Ticket]:
        """Step the engine once; return the tickets that are not done."""
        engine, remaining, begin = self.pipe.engine, list[_Ticket](), time.monotonic()
        for ticket in running:
            if ticket.cancelled and ticket.job:
                engine.cancel(ticket.job)
            elif not ticket.cancelled and not ticket.job:
                request, put = ticket.request, ticket.put
                if request.preview_every:
                    request = replace(request, on_preview=lambda numbers, seen, put=put: put(Partial(numbers, seen)))
                ticket.job = engine.submit(request)
        running = [ticket for ticket in running if not ticket.cancelled]
        before = sum(ticket.job.progress for ticket in running if ticket.job)
        if running:
            engine.step()
        drawn = sum(ticket.job.progress for ticket in running if ticket.job) - before
        if drawn > 0:
            seconds = (time.monotonic() - begin) / drawn
            self.seconds_per_candidate += _RATE_SHARE * (seconds - self.seconds_per_candidate)
        for ticket in running:
            if ticket.job and ticket.job.done:
                ticket.put(ticket.job.error or ticket.job)
            else:
                remaining.append(ticket)
        return remaining
