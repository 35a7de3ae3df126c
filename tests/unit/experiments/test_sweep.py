"""Trials whose process is killed, files of results that are damaged, a pool without shared memory, and statistics."""

import errno
import json
import math
import warnings
from multiprocessing.synchronize import SemLock
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from limner.cli import main
from limner.errors import UserError
from limner.experiments.sweep import Sweep, all_above, over_seeds, result_path, run_trials, span
from toy_trials import trial


@pytest.fixture(autouse=True)
def no_torch(monkeypatch):
    """Processes begin without torch, which takes seconds to import."""
    monkeypatch.setattr("limner.experiments.sweep.begin_process", int)


def count(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_a_killed_trial_raises_and_finished_ones_are_saved(tmp_path, monkeypatch):
    monkeypatch.setattr("limner.experiments.sweep.num_cores", lambda: 1)
    folder, counter, needed_file = tmp_path / "saved", tmp_path / "counter", tmp_path / "needed"
    settings = [{"number": number, "counter": str(counter)} for number in range(3)]
    settings[1]["needed"] = str(needed_file)
    with pytest.raises(UserError, match=r"a trial was killed, probably because memory ran out: .* trials are saved"):
        run_trials(folder, trial, settings)
    assert count(counter) == 1
    needed_file.touch()
    assert [result["number"] for result in run_trials(folder, trial, settings)] == [0, 1, 2]
    assert count(counter) == 3


WRONG = {
    "empty": lambda good: b"", "null": lambda good: b"null", "a list": lambda good: b"[]", "{}": lambda good: b"{}",
    "cut": lambda good: good[:-9], "no UTF-8": lambda good: b"\xff" + good, "deep": lambda good: b'{"a":' * 100_000,
    "no result": lambda good: b'{"result": null}', "another number": lambda good: good.replace(b"0.1", b"0.2"),
    "no hash": lambda good: json.dumps(json.loads(good)["result"]).encode(),
}  # fmt: skip


def test_a_damaged_result_is_computed_again_with_a_warning(tmp_path):
    folder, counter = tmp_path / "saved", tmp_path / "counter"
    settings = [{"number": number, "counter": str(counter)} for number in range(len(WRONG) + 1)]
    first = run_trials(folder, trial, settings)
    assert repr(first[0]) == repr({"loss": [0.1, math.nan, math.inf], "number": 0})
    paths = [result_path(folder, trial, setting) for setting in settings]
    contents = {path: path.read_bytes() for path in paths}
    for path, damage in zip(paths, WRONG.values(), strict=False):
        path.write_bytes(damage(contents[path]))
    with pytest.warns(UserWarning, match="is damaged: its trial runs again") as warned:
        assert repr(run_trials(folder, trial, settings)) == repr(first)
    assert len(warned) == len(WRONG) and count(counter) == len(settings) + len(WRONG)
    assert {path: path.read_bytes() for path in paths} == contents
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert repr(run_trials(folder, trial, settings)) == repr(first)
    assert count(counter) == len(settings) + len(WRONG)


@pytest.mark.parametrize(
    "fault", [(errno.EROFS, "Read-only file system"), (errno.ENOENT, "No such file"), (0, "Error")]
)
def test_a_system_without_shared_memory_raises(monkeypatch, tmp_path, capsys, fault):
    def fails(*_, **__):
        raise OSError(*fault)

    monkeypatch.setattr(SemLock, "__init__", fails)
    assert main(["reproduce", "bandwidth", "--quick", "-o", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("limner: no shared memory for several processes (")
    assert fault[1] in error and "mount a writable /dev/shm" in error


def test_a_sweep_tabulates_its_grid_over_seeds(monkeypatch, tmp_path):
    ran = []

    def fake(folder, trial, settings, workers):
        assert workers == 3
        ran.extend(settings)
        return [{"loss": [9.0, s["lr"] * s["seed"]], "seen": s["seed"]} for s in settings]

    monkeypatch.setattr("limner.experiments.sweep.run_trials", fake)
    grid = {("a", 1): {"lr": 2.0}, ("b", "-"): {"lr": 4.0, "batch": 8}}
    sweep = Sweep(tmp_path, trial, grid, (1, 3), workers=3, steps=2, batch=4)
    assert ran[0] == {"steps": 2, "batch": 4, "lr": 2.0, "seed": 1} and ran[2]["batch"] == 8 and len(ran) == 4
    loss, curves = {"loss": lambda runs: span(runs.losses(1), ".0f")}, {"loss": sweep.curves}
    finding = sweep.finding(True, "It is so.", ("kind", "rank"), loss, curves, window=5)
    assert finding.header == ["kind", "rank", "loss"]
    assert finding.rows == [("a", 1, "2 to 6"), ("b", "-", "4 to 12")]
    assert finding.settings == {"seeds": [1, 3], "steps": 2, "batch": 4, "window": 5}
    assert finding.curves["loss"]["a", 1] == [(0, 9.0), (1, 2.0)]
    assert sweep.runs["a", 1].mean("seen") == 2


def test_a_run_that_diverged_counts_with_its_highest_loss(monkeypatch, tmp_path):
    results = [{"loss": [1.0, 2.0, 4.0]}, {"loss": [5.0, math.nan]}]
    monkeypatch.setattr("limner.experiments.sweep.run_trials", lambda *_: results)
    sweep = Sweep(tmp_path, trial, {"x": {}}, (0, 1), steps=3)
    assert sweep.runs["x"].losses(2).tolist() == [3.0, 5.0]


@pytest.mark.parametrize(
    ("differences", "above"),
    [
        (([0.2, 0.3, 0.25],), True),
        (([0.1, 0.3, 0.2],), None),  # above 0 by 1.96 standard errors, but not by Student's t
        (([0.2, 0.3, 0.25], [-0.3, 0.4, 0.1]), None),
        (([0.2, 0.3, 0.25], [-0.3, -0.4, -0.2]), False),
        (([0.2],), None),  # one seed
    ],
)
def test_all_intervals_must_be_above_zero(differences, above):
    assert all_above(over_seeds(np.array(values)) for values in differences) is above


def test_an_interval_over_seeds_is_students():
    values = np.array([0.1, 0.3, 0.2])
    low, high = ttest_1samp(values, 0).confidence_interval(0.95)
    assert str(over_seeds(values, ".3f")) == f"0.200 ({low:.3f} to {high:.3f})"


def test_the_best_setting_is_lower_than_each_other(monkeypatch, tmp_path):
    results = [{"loss": [1.0], "x": x} for x in (1.0, 1.1, 1.5, 1.62, 1.2, 1.32)]
    monkeypatch.setattr("limner.experiments.sweep.run_trials", lambda *_: results)
    sweep = Sweep(tmp_path, trial, {"a": {}, "b": {}, "c": {}}, (0, 1), steps=1)
    columns = {"x": lambda runs: f"{runs.mean('x'):.2f}"}
    finding = sweep.best("a", "x", "loss", ("kind",), columns)
    assert finding.holds is True and finding.rows == [("a", "1.05"), ("b", "1.56"), ("c", "1.26")]
    assert finding.verdict == (
        "The loss, less that with a: 0.5100 (0.3829 to 0.6371) with b, 0.2100 (0.0829 to 0.3371) with c."
    )
    assert sweep.best("b", "x", "loss", ("kind",), columns).holds is False
