"""Progress of long operations: a bar on a terminal, periodic plain lines elsewhere (a log, CI).

    with progress("training prior", total=2000) as bar:
        for step in range(2000):
            ...
            bar.advance(1, loss=loss)

Both show the rate, the remaining time and the latest metrics on stderr; stdout is for the command's results. Long
loops call `progress: Advance`, such as `bar.advance`, with the units done since the last call. `rich` is imported only
for a bar.
"""

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Self

from limner.errors import escape_control

Advance = Callable[[int], object]  # takes the units done since the last call
_RATE_SECONDS = 120.0  # to average the rate: earlier rates do not predict the remaining time
_MAX_MARKS = 24  # in that time
_LINE_SECONDS = 10.0  # between plain lines


def progress(title: str, total: int | None = None, *, unit: str = "step", shown: bool = True) -> "Progress":
    """Return a context manager that shows a bar if stderr is a terminal, else plain lines; nothing if not `shown`."""
    kind = (BarProgress if sys.stderr.isatty() else PlainProgress) if shown else Progress
    return kind(title, total, unit=unit)


class Progress:
    """Count work without showing it; the two subclasses show it."""

    def __init__(self, title: str, total: int | None = None, *, unit: str = "step") -> None:
        self.title, self.total, self.unit, self.done = title, total, unit, 0
        self.metrics: dict[str, float | str] = {}
        self._begin()

    def _begin(self) -> None:
        self.started = time.monotonic()
        self._marks = deque([(self.started, self.done)])  # (time, units done) in the last `_RATE_SECONDS`

    def resume(self, done: int) -> None:
        """Set the units done by an earlier process, which count toward the total but not the rate."""
        self.done = done
        self._begin()
        self.show()

    def advance(self, n: int = 1, **metrics: float | str) -> None:
        """Add `n` units and update the shown metrics by name."""
        self.done += n
        self.metrics.update(metrics)
        now = time.monotonic()
        if now - self._marks[-1][0] >= _RATE_SECONDS / _MAX_MARKS:
            self._marks.append((now, self.done))
        while len(self._marks) > 2 and now - self._marks[1][0] >= _RATE_SECONDS:
            self._marks.popleft()
        self.show()

    def note(self, text: str) -> None:
        """Print a permanent line of text."""

    def show(self) -> None:
        """Update the display. Called after every change."""

    @property
    def rate(self) -> float:
        """Recent units per second."""
        since, done = self._marks[0]
        return (self.done - done) / max(time.monotonic() - since, 1e-9)

    def status(self) -> str:
        """Return rate, remaining time and metrics: "3.1 steps/s · 2:10 left · loss 4.82"."""
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

    def __exit__(self, *_: object) -> None:
        pass


class PlainProgress(Progress):
    """Plain lines on stderr: one every ten seconds and one at the end."""

    _due = 0.0

    def __enter__(self) -> Self:
        super().__enter__()
        self._due = self.started + _LINE_SECONDS
        return self

    def show(self) -> None:
        if self.done != self.total and time.monotonic() >= self._due:  # `__exit__` prints the last line
            self._due = time.monotonic() + _LINE_SECONDS
            self.note(self._line())

    def note(self, text: str) -> None:
        print(escape_control(text), file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        self.note(f"{self._line()} · took {clock(time.monotonic() - self.started)}")

    def _line(self) -> str:
        count = f"{self.done}" if self.total is None else f"{self.done}/{self.total}"
        return f"{self.title}: {count}" + (f" · {status}" if (status := self.status()) else "")


class BarProgress(Progress):
    """A bar of `rich` that stays in place; other output appears above it."""

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
        self._bar.console.print(escape_control(text), markup=False, highlight=False)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def clock(seconds: float) -> str:
    """Format seconds as 0:07, 12:30 or 1:02:03."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"
