import os
import subprocess
import sys
from pathlib import Path

import pytest

from limner import progress as module
from limner.progress import BarProgress, PlainProgress, Progress, clock, progress


@pytest.fixture
def time(monkeypatch):
    class Clock:
        now = 100.0

        def monotonic(self) -> float:
            return self.now

    fake = Clock()
    monkeypatch.setattr(module, "time", fake)
    return fake


def test_plain_lines_come_every_few_seconds_with_rate_and_time_left(time, capsys) -> None:
    with progress("training", total=100) as bar:
        assert isinstance(bar, PlainProgress)  # stderr is not a terminal here
        for _ in range(50):
            time.now += 0.5
            bar.advance(1, loss=0.12345)
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines() == [
        "training: 20/100 · 2 steps/s · 0:40 left · loss 0.1235",
        "training: 40/100 · 2 steps/s · 0:30 left · loss 0.1235",
        "training: 50/100 · 2 steps/s · 0:25 left · loss 0.1235 · took 0:25",
    ]


def test_the_end_is_reported_once_also_when_a_line_is_due_then(time, capsys) -> None:
    with progress("training", total=4) as bar:
        for _ in range(4):
            time.now += 5
            bar.advance(1)
    assert capsys.readouterr().err.splitlines() == [
        "training: 2/4 · 5.0 s/step · 0:10 left",
        "training: 4/4 · 5.0 s/step · took 0:20",
    ]


def test_resumed_work_is_done_but_does_not_count_as_speed(time, capsys) -> None:
    with PlainProgress("training", total=100) as bar:
        bar.resume(90)
        time.now += 5
        bar.advance(1)
        assert bar.rate == pytest.approx(0.2)
    assert "91/100 · 5.0 s/step · 0:45 left" in capsys.readouterr().err


def test_the_rate_is_that_of_the_last_minutes(time) -> None:
    bar = Progress("training", total=10_000)
    for seconds, steps in ((10.0, 60), (0.5, 600)):  # ten minutes with other work, then five without
        for _ in range(steps):
            time.now += seconds
            bar.advance(1)
    assert bar.rate == pytest.approx(2)
    time.now += 600  # ten minutes without a step
    assert bar.rate < 0.5


def test_a_total_may_be_unknown(time, capsys) -> None:
    with PlainProgress("reading", unit="image") as bar:
        time.now += 2
        bar.advance(500, kept="80%")
    assert capsys.readouterr().err == "reading: 500 · 250 images/s · kept 80% · took 0:02\n"


def test_the_bar_draws_and_notes_stay(capsys) -> None:
    with BarProgress("drawing [/a]", total=3) as bar:
        bar.resume(1)
        bar.note("resuming from [1]")
        bar.advance(2, loss=1.5)
    err = capsys.readouterr().err
    assert "drawing [/a]" in err and "resuming from [1]" in err and "3/3" in err and "loss 1.5" in err


def test_the_silent_kind_counts() -> None:
    with Progress("training") as bar:
        bar.advance(3)
        bar.note("unheard")
    assert bar.done == 3


def test_rich_is_not_imported_before_a_bar_shows() -> None:
    code = "import limner.progress, sys; sys.exit(bool({'rich', 'torch'} & {*sys.modules}))"
    env = {**os.environ, "PYTHONPATH": str(Path(module.__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", code], env=env).returncode == 0


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3725, "1:02:05")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text
