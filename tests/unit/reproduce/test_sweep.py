"""Trials whose process is killed, and files of results that are damaged."""

import json
import math
import warnings
from pathlib import Path

import pytest

from limner.errors import UserError
from limner.reproduce.sweep import Trials
from toy_trials import Setting, trial


@pytest.fixture(autouse=True)
def no_torch(monkeypatch):
    """Processes begin without torch, which takes seconds to import."""
    monkeypatch.setattr("limner.reproduce.sweep._begin", int)


def count(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_a_killed_trial_is_a_sentence_and_the_finished_ones_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("limner.reproduce.sweep._cores", lambda: 1)  # in turn
    trials, counter, room = Trials(tmp_path / "kept"), tmp_path / "counter", tmp_path / "room"
    settings = [Setting(0, str(counter)), Setting(1, str(counter), str(room)), Setting(2, str(counter))]
    with pytest.raises(UserError, match=r"a trial was killed, probably because memory ran out: .* trials are kept"):
        trials.run(trial, settings, "trying")
    assert count(counter) == 1
    room.touch()
    assert [result["number"] for result in trials.run(trial, settings, "trying")] == [0, 1, 2]
    assert count(counter) == 3


WRONG = {
    "empty": lambda good: b"", "null": lambda good: b"null", "a list": lambda good: b"[]", "{}": lambda good: b"{}",
    "cut": lambda good: good[:-9], "no UTF-8": lambda good: b"\xff" + good, "deep": lambda good: b'{"a":' * 100_000,
    "no result": lambda good: b'{"result": null}', "another number": lambda good: good.replace(b"0.1", b"0.2"),
    "of another release": lambda good: json.dumps(json.loads(good)["result"]).encode(),
}  # fmt: skip


def test_a_damaged_result_is_computed_again_with_a_warning(tmp_path):
    trials, counter = Trials(tmp_path / "kept"), tmp_path / "counter"
    settings = [Setting(number, str(counter)) for number in range(len(WRONG) + 1)]
    first = trials.run(trial, settings, "trying")
    assert repr(first[0]) == repr({"loss": [0.1, math.nan, math.inf], "number": 0})
    paths = {trials.folder / f"{trials._key(trial, one)}.json": one for one in settings}
    contents = {path: path.read_bytes() for path in paths}
    for path, damage in zip(paths, WRONG.values(), strict=False):
        path.write_bytes(damage(contents[path]))
    with pytest.warns(UserWarning, match="is damaged: its trial runs again") as said:
        assert repr(trials.run(trial, settings, "trying")) == repr(first)
    assert len(said) == len(WRONG) and count(counter) == len(settings) + len(WRONG)
    assert {path: path.read_bytes() for path in paths} == contents
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert repr(trials.run(trial, settings, "trying")) == repr(first)
    assert count(counter) == len(settings) + len(WRONG)
