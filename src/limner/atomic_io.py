"""Writing files so that a reader never meets half of one, and folders that one process at a time writes to.

A write goes to a temporary file in the same folder, is flushed to the disk, and takes the name of
the old file in one step (`os.replace` is atomic within a file system): whoever opens the path sees
the old content or the new, whatever happens in between. Temporary files of a killed process are removed by the
next process that writes the same name.

A process locks each lock file and temporary file that it writes (`flock`). The operating system releases the lock
when the process ends, however it ends. Systems without `fcntl` have no such locks, nor have some file systems of
clusters: there two writers are not kept apart.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from limner.errors import UserError

fcntl: Any
try:
    import fcntl
except ImportError:
    fcntl = None

LOCK = ".lock"  # the file that `locked` leaves in a folder
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # what `flock` says on a file system without locks


def require_file(path: str | os.PathLike[str]) -> None:
    """Raise `UserError` for a pipe, a device or a folder: reading one may never end.

    A missing path raises nothing here; opening it will.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"{path} is not a file but a folder, a pipe or a device")


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """An `OSError` of the block (a full disk, say) gets the file's name, as errors of `open` have it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or os.fspath(path)
        raise


@contextlib.contextmanager
def atomic_writer(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A binary file that takes the name `path` when the block ends, and vanishes if it raises."""
    path = Path(path)
    with naming(path), _temporary(path, folder=False) as (temporary, descriptor):
        with open(descriptor, "wb", closefd=False) as file:
            yield file
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    _sync_folder(path.parent)


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to `path`, all or nothing; missing folders are made."""
    with atomic_writer(path) as file:
        file.write(data)


def atomic_write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path` as UTF-8, all or nothing; missing folders are made.

    Raises `UserError` for text that no UTF-8 file can hold: bytes of an argument or of a name that were not UTF-8.
    """
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        bad = ascii(text[error.start : error.end][:20])
        raise UserError(f"{path} is UTF-8 and cannot hold {bad}: give names and options that are UTF-8") from None
    atomic_write_bytes(path, data)


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike[str], check: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """A new folder to fill, which takes the place of `path` when the block ends, and vanishes if it raises, or if
    `check` does, which is called when all is on the disk."""
    path = Path(path).resolve()  # of a link, what it points to is replaced
    with _temporary(path, folder=True) as (fresh, _):
        yield fresh
        for file in (*fresh.iterdir(), fresh):
            sync(file)
        check()
        if path.exists():
            _exchange(fresh, path)
            shutil.rmtree(fresh)
        else:
            os.replace(fresh, path)
    _sync_folder(path.parent)


@contextlib.contextmanager
def locked(folder: str | os.PathLike[str]) -> Iterator[int]:
    """Make the folder if it is missing, and lock it against other processes until the block ends.

    Gives the descriptor of the lock (-1 where there are none): a child process that inherits it holds the lock, too,
    and keeps it when this process dies. Raises `UserError` if another process has the folder.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"{folder} is a file: name a folder to write to") from None
    path, descriptor = folder / LOCK, -1
    if fcntl is not None:
        try:
            descriptor = _locked_file(path)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            path.unlink(missing_ok=True)
    if descriptor == -1:
        yield -1
        return
    if descriptor is None:
        try:
            who = path.read_text(errors="replace")[:20].strip()
        except FileNotFoundError:  # it ends just now
            who = ""
        raise UserError(
            f"{folder} is being written to by another process{who and f' ({who})'}: wait until it has ended, or name "
            "another folder"
        )
    try:
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield descriptor
    finally:
        path.unlink(missing_ok=True)  # before the lock goes, so that nobody has it yet
        os.close(descriptor)


def file_hash(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file's content, as 64 hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Have the operating system write a file, or a folder's entries, to the disk."""
    if os.name == "nt" and path.is_dir():  # Windows has no handle for that
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    """Make a rename itself durable, where the system lets a folder be synced."""
    with contextlib.suppress(OSError):
        sync(folder)


@contextlib.contextmanager
def _temporary(path: Path, folder: bool) -> Iterator[tuple[Path, int]]:
    """A new file or folder beside `path`, open and locked, which is gone afterwards unless it was renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        if folder:
            temporary.mkdir()
        descriptor = os.open(temporary, os.O_RDONLY if folder else os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        if fcntl is not None:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:  # else another process removed it as abandoned before it was locked
            break
        os.close(descriptor)
    try:
        yield temporary, descriptor
    finally:
        os.close(descriptor)
        if folder:
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def _remove_abandoned(path: Path) -> None:
    """Remove what killed writers of `path` left beside it: temporary files and folders that nobody has locked."""
    ours = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.tmp")
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if ours.fullmatch(entry.name) and (descriptor := _locked_file(entry.path)) is not None:
                is_folder = entry.is_dir(follow_symlinks=False)
                shutil.rmtree(entry.path) if is_folder else os.unlink(entry.path)
                os.close(descriptor)


def _locked_file(path: str | os.PathLike[str]) -> int | None:
    """The descriptor of a file (made if it is not there) or folder with its lock; None if another process has it.

    Raises `OSError` on a file system without locks.
    """
    if fcntl is None:
        return None
    while True:
        kind = os.O_RDONLY if os.path.isdir(path) else os.O_RDWR | os.O_CREAT
        descriptor = os.open(path, kind | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in _NO_LOCKS:
                raise
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)  # its last holder has removed it: begin again


def _exchange(a: Path, b: Path) -> None:
    """Let two folders swap names: at once where the system can (Linux), else by way of a third name."""
    function = getattr(ctypes.CDLL(None), "renameat2", None) if os.name == "posix" else None
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if function is None or function(here, os.fsencode(a), here, os.fsencode(b), exchange) != 0:
        third = a.with_name(f"{a.name}.tmp")
        os.replace(b, third)
        os.replace(a, b)
        os.replace(third, a)
