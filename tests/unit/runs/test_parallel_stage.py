"""The prior beside the contrastive model: what its training takes when the other process ends."""

import subprocess
import sys

import pytest
import torch

from limner import recipes
from limner.errors import UserError
from limner.runs.parallel_stage import LOG, _Watch, contrastive_beside


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
        watch = _Watch(process, tmp_path / "log", threads=2)
        watch.on_report(None, {})  # pyright: ignore[reportArgumentType]
        assert torch.get_num_threads() == 1
        process.communicate(b"\n")
    watch.on_report(None, {})  # pyright: ignore[reportArgumentType]
    assert torch.get_num_threads() == 2


def test_and_ends_when_it_failed(threads, tmp_path):
    (tmp_path / "log").write_text("limner: no room\n")
    with child("raise SystemExit(3)") as process:
        process.wait()
    with pytest.raises(UserError, match="no room"):
        _Watch(process, tmp_path / "log", threads=2).on_report(None, {})  # pyright: ignore[reportArgumentType]
    assert torch.get_num_threads() == 1


def test_no_code_of_the_folder_where_the_command_is_given_runs(threads, tmp_path, monkeypatch):
    (tmp_path / "numpy.py").write_text("raise SystemExit('a stranger')")
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(UserError, match=r"failed .*recipe\.json"),
        contrastive_beside(recipes.get("scenes"), "data", tmp_path, -1) as watch,
    ):
        watch.process.wait()  # pyright: ignore[reportAttributeAccessIssue]
    assert "stranger" not in (tmp_path / LOG).read_text()
