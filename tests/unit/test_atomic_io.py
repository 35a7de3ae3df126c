"""Files and folders that appear whole or not at all, and locks that end with their holder; real processes."""

import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from limner.atomic_io import atomic_folder, atomic_write_text, atomic_writer, exclusive_lock
from limner.errors import UserError

SOURCE = str(Path(__file__).parents[2] / "src")


def process(code: str, *arguments: object) -> subprocess.Popen:
    """Runs until its input ends; it says a line when it has come to where it waits."""
    code += "\nprint('ready', flush=True); import sys; sys.stdin.read()"
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    started = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert started.stdout is not None and started.stdout.readline() == b"ready\n"
    return started


HOLDS = "import sys; from limner import atomic_io as a; x = a.exclusive_lock(sys.argv[1]); descriptor = x.__enter__()"
WRITES = "import sys; from limner.atomic_io import {0}; open_ = {0}(sys.argv[1]); x = open_.__enter__()"


def kill(holder: subprocess.Popen) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.communicate()


def test_a_locked_folder_is_refused_until_its_holder_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    holder = process(HOLDS, folder)
    with (
        pytest.raises(UserError, match=rf" \({holder.pid}\) is writing to .*b:"),
        exclusive_lock(folder),
    ):
        pass
    kill(holder)
    with exclusive_lock(folder), pytest.raises(UserError, match=str(os.getpid())), exclusive_lock(folder):
        pass
    assert list(folder.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file"), exclusive_lock(tmp_path / "file"):
        pass


def test_a_file_system_without_locks_is_written_to_without(tmp_path: Path, monkeypatch) -> None:
    def refuses(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuses)
    with exclusive_lock(tmp_path / "run") as descriptor:
        assert descriptor == -1
        abandoned = tmp_path / "run" / ".file.0123abcd.tmp"  # or not: nobody can tell
        abandoned.touch()
        atomic_write_text(tmp_path / "run" / "file", "text")
    assert {entry.name for entry in (tmp_path / "run").iterdir()} == {"file", abandoned.name}


def test_a_child_that_inherits_the_lock_keeps_it(tmp_path: Path) -> None:
    spawns = """
import subprocess
child = subprocess.Popen(["sleep", "60"], pass_fds=[descriptor], stdout=subprocess.DEVNULL)
open(sys.argv[2], "w").write(str(child.pid))"""
    holder = process(HOLDS + spawns, tmp_path / "run", tmp_path / "pid")
    kill(holder)
    with pytest.raises(UserError, match="another process"), exclusive_lock(tmp_path / "run"):
        pass
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    for _ in range(200):  # the kill takes effect when the system gets to it
        try:
            with exclusive_lock(tmp_path / "run"):
                return
        except UserError:
            subprocess.run(["sleep", "0.02"], check=True)
    pytest.fail("the lock has outlived its holders")


@pytest.mark.parametrize("writer", ["atomic_writer", "atomic_folder"])
def test_files_of_a_killed_writer_are_removed_and_those_of_a_running_one_are_not(writer: str, tmp_path: Path) -> None:
    path = tmp_path / "out"
    other = tmp_path / ".out.txt.0123abcd.tmp"  # of another name
    other.touch()
    dead, living = (process(WRITES.format(writer), path) for _ in range(2))
    kill(dead)
    assert len(list(tmp_path.iterdir())) == 3
    with atomic_folder(path) if writer == "atomic_folder" else atomic_writer(path):
        pass
    left = {entry.name for entry in tmp_path.iterdir()}
    assert {"out", other.name} < left and len(left) == 3
    kill(living)
    with atomic_folder(path) if writer == "atomic_folder" else atomic_writer(path):
        pass
    assert {entry.name for entry in tmp_path.iterdir()} == {"out", other.name}


def _writes_often(path: str) -> list[str]:
    """Replace the file `path` and the folder `path`.folder 300 times each; return the errors."""
    errors = []
    for _ in range(300):
        try:
            atomic_write_text(path, "text")
            with atomic_folder(f"{path}.folder") as fresh:
                (fresh / "file").touch()
        except OSError as error:
            errors.append(repr(error))
    return errors


def test_processes_that_write_the_same_path_do_not_remove_each_others_temporary_files(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert pool.map(_writes_often, [str(tmp_path / "out")] * 4, chunksize=1) == [[]] * 4
    assert {entry.name for entry in tmp_path.iterdir()} == {"out", "out.folder"}
    assert [entry.name for entry in (tmp_path / "out.folder").iterdir()] == ["file"]


def test_a_folder_is_replaced_whole_or_stays(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "out"
    for text in ("one", "two"):
        with atomic_folder(path) as fresh:
            (fresh / text).touch()
    assert [entry.name for entry in path.iterdir()] == ["two"]
    with pytest.raises(IsADirectoryError), atomic_folder(path) as fresh:
        (fresh / ".").write_text("fails")
    monkeypatch.setattr("ctypes.CDLL", lambda name: None)  # a system that cannot exchange names
    with atomic_folder(path) as fresh:
        (fresh / "four").touch()
    assert [entry.name for entry in path.iterdir()] == ["four"] and list(tmp_path.iterdir()) == [path]


def test_a_link_to_a_folder_stays_one(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with atomic_folder(tmp_path / "link") as fresh:
        (fresh / "new").touch()
    assert (tmp_path / "link").is_symlink() and (tmp_path / "elsewhere" / "new").exists()
    assert {entry.name for entry in tmp_path.iterdir()} == {"link", "elsewhere"}


def test_a_file_that_raises_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_write_text(path, "old")
    with pytest.raises(TypeError), atomic_writer(path) as file:
        file.write("no bytes")  # pyright: ignore
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left on device: '.*wanted'"), atomic_writer(tmp_path / "wanted"):
        os.write(os.open("/dev/full", os.O_WRONLY), b"x")
    assert list(tmp_path.iterdir()) == []


def test_text_that_is_not_unicode_is_refused(tmp_path: Path) -> None:
    atomic_write_text(tmp_path / "f", "old")
    with pytest.raises(UserError, match=r"f is a UTF-8 file and cannot contain '.udcff'"):
        atomic_write_text(tmp_path / "f", "a\udcffb")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("f", "old")]
