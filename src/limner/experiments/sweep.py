"""Short trainings in parallel on the cores of this machine. Each result is saved when its trial ends.

A small model uses only one core, so each trial runs in a separate process with one thread. A trial's result is a file,
{"result": ..., "sha256": hash of the result's JSON}. Repeating the command after Ctrl-C runs only the trials whose file
is missing or damaged.
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
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from limner.atomic_io import atomic_write_text
from limner.errors import UserError
from limner.experiments.pool import process_pool
from limner.json_files import read_json
from limner.progress import progress
from limner.version import __version__

T = TypeVar("T")
Result = dict[str, Any]  # JSON values

_KILLED_MESSAGE = (
    "the process of a trial was killed, probably because memory ran out: close other programs, or run one trial at a "
    "time (on Linux with taskset -c 0); finished trials are saved, and the same command resumes"
)


class TrialRunner:
    """A runner of trials, `workers` at a time (default: all cores), that saves their results in `folder`."""

    def __init__(self, folder: Path, workers: int | None = None) -> None:
        self.folder, self.workers = folder, workers or _cores()

    def run(self, trial: Callable[[T], Result], settings: Sequence[T], title: str) -> list[Result]:
        """Return the results of `trial` for all settings, in their order.

        Args:
            trial: a module-level function, which another process imports.
            settings: frozen dataclasses; a result may depend only on their `repr` and the code.
            title: title of the progress bar.

        Raises `UserError` if a trial's process is killed; results of finished trials are saved.
        """
        paths = [self.path(trial, setting) for setting in settings]
        results = [_load(path) for path in paths]
        missing = [i for i, result in enumerate(results) if result is None]
        self.folder.mkdir(parents=True, exist_ok=True)
        with progress(title, len(settings), unit="trial") as bar:
            bar.resume(len(settings) - len(missing))
            with process_pool(self.workers, begin_process) as pool:
                try:
                    running = {pool.submit(trial, settings[i]): i for i in missing}
                    for future in as_completed(running):
                        results[running[future]] = _save(paths[running[future]], future.result())
                        bar.advance()
                except BaseException as error:  # Ctrl-C: do not wait for running trials
                    pool.shutdown(wait=False, cancel_futures=True)
                    for process in multiprocessing.active_children():
                        process.terminate()
                    if isinstance(error, BrokenProcessPool):
                        raise UserError(_KILLED_MESSAGE) from error
                    raise
        return [result for result in results if result is not None]

    def path(self, trial: Callable[[T], Result], setting: T) -> Path:
        """Return the file of a result, named by setting, source of the trial's module, and limner's version."""
        source = inspect.getsource(sys.modules[trial.__module__])
        text = f"{__version__} {trial.__module__}.{trial.__qualname__} {setting!r} {source}"
        return self.folder / f"{_digest(text)[:24]}.json"


def _save(path: Path, result: Result) -> Result:
    """Write a trial's result. Returns the value that `_load` reads back."""
    text = json.dumps(result)  # lossless in Python, including NaN and infinities
    atomic_write_text(path, f'{{"result": {text}, "sha256": "{_digest(text)}"}}\n')
    return json.loads(text)


def _load(path: Path) -> Result | None:
    """Return the result in a file. None if the file is missing or, with a warning, damaged."""
    if not path.exists():
        return None
    with suppress(UserError, KeyError, TypeError):
        saved = read_json(path, 1 << 30)
        if saved["sha256"] == _digest(json.dumps(saved["result"])):
            return saved["result"]
    warnings.warn(f"{path} is damaged: its trial runs again", stacklevel=3)
    return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def begin_process() -> None:
    """Initialize a process that runs trials."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent handles it
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(1)


def _exit_with_parent() -> None:
    """End this process when its parent ends, also if the parent is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
