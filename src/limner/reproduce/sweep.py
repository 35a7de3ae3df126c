"""Short trainings, side by side on the cores of this machine, each kept as soon as it is done.

Small models keep no more than one core busy, so each trial has one thread and a process of its own. A trial's result is
a file: the same command, given again after Ctrl-C, runs only those that are missing.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any, TypeVar

from limner.atomic_io import atomic_write_text
from limner.progress import progress
from limner.reproduce.pool import process_pool
from limner.version import __version__

T = TypeVar("T")
Result = dict[str, Any]  # that JSON can hold


class Trials:
    """Runs trials and keeps their results in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, trial: Callable[[T], Result], settings: Sequence[T], title: str) -> list[Result]:
        """`trial` of each of the settings, in their order.

        Args:
            trial: a function of a module, which a process of its own imports.
            settings: frozen dataclasses, whose `repr` says all that a result depends on, besides the code.
            title: of the progress bar.
        """
        paths = [self.folder / f"{self._key(trial, one)}.json" for one in settings]
        todo = [i for i, path in enumerate(paths) if not path.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        with progress(title, len(settings), unit="trial") as bar:
            bar.resume(len(settings) - len(todo))
            with process_pool(_cores(), _begin) as pool:
                running = {pool.submit(trial, settings[i]): i for i in todo}
                try:
                    for done in as_completed(running):
                        atomic_write_text(paths[running[done]], json.dumps(done.result()))
                        bar.advance()
                except BaseException:  # Ctrl-C: what is running is lost, and nobody waits for it
                    pool.shutdown(wait=False, cancel_futures=True)
                    for process in multiprocessing.active_children():
                        process.terminate()
                    raise
        return [json.loads(path.read_text("utf-8")) for path in paths]

    @staticmethod
    def _key(trial: Callable[[T], Result], settings: T) -> str:
        """Of a file; another one when the trial's module or the package's version is another."""
        source = inspect.getsource(sys.modules[trial.__module__])
        said = f"{__version__} {trial.__module__}.{trial.__qualname__} {settings!r} {source}"
        return hashlib.sha256(said.encode()).hexdigest()[:24]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _begin() -> None:
    """In a process that runs trials."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the first one decides
    threading.Thread(target=_end_with_the_first, daemon=True).start()
    import torch

    torch.set_num_threads(1)


def _end_with_the_first() -> None:
    """Where the process that asked for trials is killed, nobody wants them."""
    first = multiprocessing.parent_process()
    assert first is not None
    first.join()
    os._exit(1)
