"""Trials whose process is killed, and files of results that are damaged."""

import json
import math
import warnings
from pathlib import Path

import pytest

from limner.errors import UserError
from limner.experiments.sweep import TrialRunner
from toy_trials import Setting, trial


@pytest.fixture(autouse=True)
def no_torch(monkeypatch):
    """Processes begin without torch, which takes seconds to import."""
    monkeypatch.setattr("limner.experiments.sweep.begin_process", int)


def count(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_a_killed_trial_raises_and_finished_ones_are_saved(tmp_path):
    runner, counter, needed_file = TrialRunner(tmp_path / "saved", workers=1), tmp_path / "counter", tmp_path / "needed"
    settings = [Setting(0, str(counter)), Setting(1, str(counter), str(needed_file)), Setting(2, str(counter))]
    with pytest.raises(UserError, match=r"a trial was killed, probably because memory ran out: .* trials are saved"):
        runner.run(trial, settings, "trying")
    assert count(counter) == 1
    needed_file.touch()
    assert [result["number"] for result in runner.run(trial, settings, "trying")] == [0, 1, 2]
    assert count(counter) == 3


WRONG = {
    "empty": lambda good: b"", "null": lambda good: b"null", "a list": lambda good: b"[]", "{}": lambda good: b"{}",
    "cut": lambda good: good[:-9], "no UTF-8": lambda good: b"\xff" + good, "deep": lambda good: b'{"a":' * 100_000,
    "no result": lambda good: b'{"result": null}', "another number": lambda good: good.replace(b"0.1", b"0.2"),
    "no hash": lambda good: json.dumps(json.loads(good)["result"]).encode(),
}  # fmt: skip


def test_a_damaged_result_is_computed_again_with_a_warning(tmp_path):
    runner, counter = TrialRunner(tmp_path / "saved"), tmp_path / "counter"
    settings = [Setting(number, str(counter)) for number in range(len(WRONG) + 1)]
    first = runner.run(trial, settings, "trying")
    assert repr(first[0]) == repr({"loss": [0.1, math.nan, math.inf], "number": 0})
    paths = [runner.path(trial, setting) for setting in settings]
    contents = {path: path.read_bytes() for path in paths}
    for path, damage in zip(paths, WRONG.values(), strict=False):
        path.write_bytes(damage(contents[path]))
    with pytest.warns(UserWarning, match="is damaged: its trial runs again") as warned:
        assert repr(runner.run(trial, settings, "trying")) == repr(first)
    assert len(warned) == len(WRONG) and count(counter) == len(settings) + len(WRONG)
    assert {path: path.read_bytes() for path in paths} == contents
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert repr(runner.run(trial, settings, "trying")) == repr(first)
    assert count(counter) == len(settings) + len(WRONG)
