"""Trials over a grid of settings and several seeds, in parallel on the cores of this machine.

A small model uses only one core, so each trial runs in a separate process with one thread. A trial's result is a file,
{"result": ..., "sha256": hash of the result's JSON}. Repeating the command after Ctrl-C runs only the trials whose file
is missing or damaged.

Shapes: S seeds.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from limner.atomic_io import atomic_write_text
from limner.errors import UserError
from limner.evaluation.confidence import Estimate, mean
from limner.evaluation.report import Points
from limner.experiments.report import Finding
from limner.json_files import read_json
from limner.progress import progress
from limner.version import __version__

Result = dict[str, Any]  # JSON values
Settings = Mapping[str, Any]  # keyword arguments of a trial; a setting has the same `repr` in all processes
Trial = Callable[..., Result]  # a module-level function, whose result depends only on the arguments and the code


@dataclass(frozen=True)
class Runs:
    """The trials of one setting.

    Attributes:
        label: label of the setting in the grid.
        settings: arguments of the trial, without the seed.
        results: the result of each seed.
    """

    label: Any
    settings: Settings
    results: Sequence[Result]

    def values(self, key: str) -> Float[np.ndarray, "S ..."]:
        """Return one value of each result."""
        return np.array([result[key] for result in self.results])

    def mean(self, key: str) -> float:
        """Return the mean of one value over seeds."""
        return float(self.values(key).mean())

    def losses(self, last: int = 50) -> Float[np.ndarray, " S"]:
        """Return the mean of each run's last losses, or the highest loss of a run that diverged."""
        losses, steps = [result["loss"] for result in self.results], self.settings["steps"]
        return np.array([np.mean(run[-last:]) if len(run) == steps else np.nanmax(run) for run in losses])

    @property
    def curve(self) -> Points:
        """Losses of the first seed over steps."""
        return list(enumerate(self.results[0]["loss"]))


class Sweep:
    """Results of the trials of each setting of a grid with each seed. Trials whose results `folder` lacks run.

    Args:
        trial: runs in another process.
        grid: settings by label, the first cell of a row of the table or a tuple of its first cells.
        seeds: values of the argument `seed` of the trial; empty for a trial without this argument.
        workers: trials at a time; None for one on each core.
        common: settings of all trials, which the grid may override.

    Attributes:
        runs: by label.
        settings: seeds and settings of all trials.
    """

    def __init__(
        self, folder: Path, trial: Trial, grid: Mapping[Any, Settings], seeds: Sequence[int] = (),
        workers: int | None = None, **common: Any,
    ) -> None:  # fmt: skip
        self.settings = {"seeds": list(seeds), **common} if seeds else common
        cells = {label: {**common, **settings} for label, settings in grid.items()}
        each = [{"seed": seed} for seed in seeds] or [{}]
        results = iter(run_trials(folder, trial, [cell | seed for cell in cells.values() for seed in each], workers))
        self.runs = {label: Runs(label, cell, [next(results) for _ in each]) for label, cell in cells.items()}

    @property
    def curves(self) -> dict[str, Points]:
        """Losses of the first seed by label."""
        return {label: runs.curve for label, runs in self.runs.items()}

    def finding(
        self,
        holds: bool | None,
        verdict: str,
        labels: Sequence[str],
        columns: Mapping[str, Callable[[Runs], object]],
        curves: Mapping[str, Mapping[str, Points]],
        **settings: Any,
    ) -> Finding:
        """Return a `Finding` whose table has a row for each setting.

        Args:
            labels: headers of the cells of a label.
            columns: further headers, and the cell of each as a function of the runs.
            settings: settings that are not arguments of the trial.
        """
        rows = [
            (*(label if isinstance(label, tuple) else (label,)), *(cell(runs) for cell in columns.values()))
            for label, runs in self.runs.items()
        ]
        return Finding(holds, verdict, [*labels, *columns], rows, curves, self.settings | settings)

    def best(
        self, label: str, key: str, value: str, labels: Sequence[str], columns: Mapping[str, Callable[[Runs], object]]
    ) -> Finding:
        """Return the finding that the setting `label` has a lower value `key`, named `value`, than each other one."""
        ours = self.runs[label].values(key)
        gaps = {name: over_seeds(runs.values(key) - ours) for name, runs in self.runs.items() if name != label}
        differences = ", ".join(f"{gap} with {name}" for name, gap in gaps.items())
        verdict = f"The {value}, less that with {label}: {differences}."
        return self.finding(all_above(gaps.values()), verdict, labels, columns, {"loss, first seed": self.curves})


def deviation(values: Float[np.ndarray, " S"]) -> float:
    """Return the standard deviation of the population, estimated from several seeds; 0 for one seed."""
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def over_seeds(values: Float[np.ndarray, " S"], spec: str = ".4f") -> Estimate:
    """Return the mean of one value, or difference, per seed, with its 95% interval by Student's t if S >= 2."""
    return replace(mean(values, ""), spec=spec)


def all_above(estimates: Iterable[Estimate], value: float = 0.0) -> bool | None:
    """Return True if the interval of each estimate is above a value, False if one is below it, None otherwise."""
    bounds = [(-math.inf, math.inf) if x.low is None or x.high is None else (x.low, x.high) for x in estimates]
    if any(high < value for _, high in bounds):
        return False
    return True if all(low > value for low, _ in bounds) else None


def span(values: Float[np.ndarray, " S"], spec: str) -> str:
    """Format the lowest and the highest value."""
    return f"{values.min():{spec}} to {values.max():{spec}}"


def run_trials(folder: Path, trial: Trial, settings: Sequence[Settings], workers: int | None = None) -> list[Result]:
    """Return the results for all settings, in their order. Equal settings share a result, which `folder` keeps.

    Raises `UserError` if a trial's process is killed; results of finished trials are saved.
    """
    paths = [result_path(folder, trial, setting) for setting in settings]
    unique = dict(zip(paths, settings, strict=True))
    results = {path: result for path in unique if (result := _load(path)) is not None}
    folder.mkdir(parents=True, exist_ok=True)
    with progress("running trials", len(unique), unit="trial") as bar, process_pool(workers or num_cores()) as pool:
        bar.resume(len(results))
        try:
            running = {pool.submit(trial, **unique[path]): path for path in unique if path not in results}
            for future in as_completed(running):
                path = running[future]
                results[path] = _save(path, future.result())
                bar.advance()
        except BaseException as error:  # Ctrl-C: do not wait for running trials
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            if isinstance(error, BrokenProcessPool):
                raise UserError(
                    "the process of a trial was killed, probably because memory ran out: close other programs, or run "
                    "one trial at a time (on Linux with taskset -c 0); finished trials are saved, and the same command "
                    "resumes"
                ) from error
            raise
    return [results[path] for path in paths]


def result_path(folder: Path, trial: Trial, setting: Settings) -> Path:
    """Return the file of a result, named by setting, source of this package, and limner's version."""
    source = "".join(path.read_text("utf-8") for path in sorted(Path(__file__).parent.glob("*.py")))
    return (
        folder / f"{_digest(f'{__version__} {trial.__module__}.{trial.__qualname__} {setting!r} {source}')[:24]}.json"
    )


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


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def process_pool(workers: int) -> ProcessPoolExecutor:
    """Return a pool of processes for trials. They are forked, where the system can, from a process that has imported
    torch and, since optimizers do, its compiler. Raises `UserError` if shared memory is missing."""
    methods = [name for name in ("forkserver", "spawn") if name in multiprocessing.get_all_start_methods()]
    context = multiprocessing.get_context(methods[0])
    context.set_forkserver_preload(["limner.experiments.tiny_models", "torch._dynamo"])  # spawned processes ignore it
    try:
        context.Lock()
    except (OSError, ImportError) as error:
        raise UserError(
            f"no shared memory for several processes ({error}): mount a writable /dev/shm with free space "
            "(for a container, docker run --shm-size 1g)"
        ) from None
    return ProcessPoolExecutor(workers, context, begin_process)


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
