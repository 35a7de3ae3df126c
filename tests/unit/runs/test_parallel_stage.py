"""Parallel training of the prior and the contrastive model: threads, errors and skipped updates."""

import shutil
import subprocess
import sys
from unittest import mock

import pytest
import torch

from limner import recipes
from limner.errors import UserError
from limner.runs.parallel_stage import LOG_FILE, WorkerHook, contrastive_in_parallel
from limner.training.checkpoint import Checkpointer
from tiny import tiny_recipe


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def child(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)


def test_the_prior_has_all_threads_when_the_other_process_is_done(threads, tmp_path):
    with child("input()") as process:
        hook = WorkerHook(process, tmp_path / "log", threads=2)
        hook.before_log(None, {})  # pyright: ignore[reportArgumentType]
        assert torch.get_num_threads() == 1
        process.communicate(b"\n")
    hook.before_log(None, {})  # pyright: ignore[reportArgumentType]
    assert torch.get_num_threads() == 2


def test_a_failed_worker_raises(threads, tmp_path):
    (tmp_path / "log").write_text("limner: disk full\n")
    with child("raise SystemExit(3)") as process:
        process.wait()
    with pytest.raises(UserError, match="disk full"):
        WorkerHook(process, tmp_path / "log", threads=2).before_log(None, {})  # pyright: ignore[reportArgumentType]
    assert torch.get_num_threads() == 1


def test_modules_in_the_current_folder_are_not_imported(threads, tmp_path, monkeypatch):
    (tmp_path / "numpy.py").write_text("raise SystemExit('a stranger')")
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(UserError, match=r"failed .*recipe\.json"),
        contrastive_in_parallel(recipes.get("scenes"), "data", tmp_path, -1) as hook,
    ):
        hook.process.wait()  # pyright: ignore[reportAttributeAccessIssue]
    assert "stranger" not in (tmp_path / LOG_FILE).read_text()


@pytest.mark.parametrize(
    ("log", "code", "reason"),
    [
        ("limner.errors.UserError: training diverged\nx.py:3: UserWarning: cut\n  warn()\n", 1, "diverged"),
        ("MemoryError\n  warn()\n", 1, "MemoryError"),
        (
            "UserError: of an earlier start\nlast line\n",
            -9,
            "signal 9 killed the process, perhaps because memory ran out",
        ),
        ("", 1, "no output"),
    ],
)
def test_the_reason_is_found_in_the_log(tmp_path, log, code, reason):
    (tmp_path / "log").write_text(log)
    process = mock.Mock(poll=lambda: code)
    with pytest.raises(UserError, match=rf"in parallel failed \([^)]*{reason}[^)]*\): see"):
        WorkerHook(process, tmp_path / "log", threads=2).check()


@pytest.mark.parametrize("skipped", [0, 14])
def test_skipped_updates_of_the_worker_are_printed(tmp_path, monkeypatch, capsys, skipped):
    state = {"step": 15, "skipped": skipped}
    Checkpointer(tmp_path / "contrastive", 1).save(15, {"x": {"x": torch.zeros(1)}}, state)
    monkeypatch.setattr("sys.executable", shutil.which("true"))
    with contrastive_in_parallel(tiny_recipe(), "data", tmp_path, -1):
        pass
    line = "14 of 15 updates of the contrastive model were skipped, since their loss or gradient was not finite\n"
    assert capsys.readouterr().err.count(line) == (skipped > 0)
