"""How far long work is: a bar on a terminal, now and then a plain line elsewhere (a log, CI).

    with progress("training prior", total=2000) as bar:
        for step in range(2000):
            ...
            bar.advance(1, loss=loss)

Both show the rate, the time left and the latest metrics, and write to stderr, so that stdout stays
the command's own. Long work takes `progress: Advance`, a callable that is told how much more is done:
`bar.advance`. `rich` is imported when a bar first shows.
"""

import sys
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from limner.errors import printable

Advance = Callable[[int], object]  # takes the units done since the last call
_RECENT = 120.0  # seconds whose mean is the rate: a slow stretch long ago says nothing of the time left
_MARKS = 24  # kept of them


def progress(
    title: str, total: int | None = None, *, unit: str = "step", every: float = 10.0, shown: bool = True
) -> "Progress":
    """A bar if stderr is a terminal, else plain lines; a context manager. `every`: seconds between plain lines;
    `shown`: False for a process that leaves this to another one."""
    kind = (BarProgress if sys.stderr.isatty() else PlainProgress) if shown else Progress
    return kind(title, total, unit=unit, every=every)


class Progress:
    """Counts work and shows nothing; the two kinds below show it."""

    def __init__(self, title: str, total: int | None = None, *, unit: str = "step", every: float = 10.0) -> None:
        self.title, self.total, self.unit, self.every = title, total, unit, every
        self.done = 0
        self.metrics: dict[str, float | str] = {}
        self._begin()

    def _begin(self) -> None:
        self.started = time.monotonic()
        self._marks = deque([(self.started, self.done)])  # when how much was done, within the last `_RECENT` seconds

    def resume(self, done: int) -> None:
        """Work that an earlier process did: part of the total, not of the rate."""
        self.done = done
        self._begin()
        self.show()

    def advance(self, n: int = 1, **metrics: float | str) -> None:
        """`n` more units are done; metrics replace those shown under the same name."""
        self.done += n
        self.metrics.update(metrics)
        now = time.monotonic()
        if now - self._marks[-1][0] >= _RECENT / _MARKS:
            self._marks.append((now, self.done))
        while len(self._marks) > 2 and now - self._marks[1][0] >= _RECENT:
            self._marks.popleft()
        self.show()

    def note(self, text: str) -> None:
        """A line of text that stays."""

    def show(self) -> None:
        """Called after every change."""

    @property
    def rate(self) -> float:
        """Units per second, lately."""
        since, done = self._marks[0]
        return (self.done - done) / max(time.monotonic() - since, 1e-9)

    def status(self) -> str:
        """Rate, time left and metrics: "3.1 steps/s · 2:10 left · loss 4.82"."""
        rate, parts = self.rate, []
        if 0 < rate < 1:
            parts.append(f"{1 / rate:.1f} s/{self.unit}")
        elif rate:
            parts.append(f"{rate:.3g} {self.unit}s/s")
        if rate and self.total is not None and self.done < self.total:
            parts.append(f"{clock((self.total - self.done) / rate)} left")
        parts += [f"{k} {v if isinstance(v, str) else format(v, '.4g')}" for k, v in self.metrics.items()]
        return " · ".join(parts)

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass


class PlainProgress(Progress):
    """A line at the start, every `every` seconds, and at the end."""

    _due = 0.0

    def __enter__(self) -> Self:
        super().__enter__()
        self._due = self.started + self.every
        return self

    def show(self) -> None:
        if self.done != self.total and time.monotonic() >= self._due:  # of the end there is a last line
            self._due = time.monotonic() + self.every
            self.note(self._line())

    def note(self, text: str) -> None:
        print(printable(text), file=self._stream(), flush=True)

    def __exit__(self, *_: object) -> None:
        self.note(f"{self._line()} · took {clock(time.monotonic() - self.started)}")

    def _line(self) -> str:
        count = f"{self.done}" if self.total is None else f"{self.done}/{self.total}"
        return f"{self.title}: {count}" + (f" · {status}" if (status := self.status()) else "")

    def _stream(self) -> TextIO:
        return sys.stderr


class BarProgress(Progress):
    """A bar that stays in place, drawn by `rich`; what else is printed appears above it."""

    def __enter__(self) -> Self:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress as Rich, TextColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}", markup=False),
        )
        self._bar = Rich(*columns, console=Console(stderr=True), refresh_per_second=4)
        self._task = self._bar.add_task(self.title, total=self.total, completed=self.done, status="")
        self._bar.start()
        return super().__enter__()

    def show(self) -> None:
        self._bar.update(self._task, completed=self.done, status=self.status())

    def note(self, text: str) -> None:
        self._bar.console.print(printable(text), markup=False, highlight=False)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def clock(seconds: float) -> str:
    """Seconds as 0:07, 12:30 or 1:02:03."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"
