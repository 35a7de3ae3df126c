"""Atomic writes of files and folders, and locks that give one process at a time write access to a folder.

A write goes to a temporary file in the same folder, is flushed to the disk, and then replaces the old file.
`os.replace` is atomic within a file system, so a reader sees the complete old or the complete new content, also after
a crash. The next writer of the same path removes temporary files of killed processes.

A process locks its lock files and temporary files with `flock`. The operating system releases the lock when the
process ends, also after a crash. Systems without `fcntl`, and some cluster file systems, do not support locks: there,
concurrent writers are not detected.
"""

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

LOCK = ".lock"  # name of the lock file of `exclusive_lock` in a folder
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # errors of `flock` on a file system without locks


def require_file(path: str | os.PathLike[str]) -> None:
    """Raise `UserError` for a pipe, a device or a folder: reading one may block forever. A missing path passes."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"{path} is a folder, a pipe or a device: name a file")


@contextlib.contextmanager
def with_filename(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add the file's name to an `OSError` of the block (such as a full disk), as errors of `open` have it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or os.fspath(path)
        raise


@contextlib.contextmanager
def atomic_writer(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a temporary binary file that replaces `path` at the end of the block. An exception deletes it."""
    path = Path(path)
    with with_filename(path), _temporary(path, folder=False) as (temporary, descriptor):
        with open(descriptor, "wb", closefd=False) as file:
            yield file
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    _sync_folder(path.parent)


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to `path` atomically. Create missing folders."""
    with atomic_writer(path) as file:
        file.write(data)


def atomic_write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path` as UTF-8, atomically. Create missing folders.

    Raises `UserError` for surrogates, which stand for non-UTF-8 bytes of arguments or file names.
    """
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        invalid = ascii(text[error.start : error.end][:20])
        raise UserError(
            f"{path} is a UTF-8 file and cannot contain {invalid}: use valid UTF-8 in names and options"
        ) from None
    atomic_write_bytes(path, data)


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike[str], check: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """Create a temporary folder that replaces `path` at the end of the block. An exception deletes it.

    `check` is called before the replacement, and may raise.
    """
    path = Path(path).resolve()  # replaces the target of a link, not the link
    with _temporary(path, folder=True) as (fresh, _):
        yield fresh
        for file in (*fresh.iterdir(), fresh):
            fsync(file)
        check()
        try:
            os.replace(fresh, path)
        except OSError:  # a folder with content has this name
            if not path.is_dir():
                raise
            _exchange(fresh, path)
    _sync_folder(path.parent)


@contextlib.contextmanager
def exclusive_lock(folder: str | os.PathLike[str]) -> Iterator[int]:
    """Lock a folder against other processes until the block ends. Create the folder if it is missing.

    Yields the descriptor of the lock, or -1 without support for locks. A child process that inherits the descriptor
    keeps the lock if this process dies. Raises `UserError` if another process holds it or `folder` is a file.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"{folder} is a file: name a folder to write to") from None
    path = folder / LOCK
    descriptor = _locked_file(path)
    if descriptor is None:
        try:
            pid = path.read_text(errors="replace")[:20].strip()
        except FileNotFoundError:  # the other process is just ending
            pid = ""
        raise UserError(
            f"another process{pid and f' ({pid})'} is writing to {folder}: wait until it ends, or name another folder"
        )
    if descriptor == -1:
        path.unlink(missing_ok=True)
        yield -1
        return
    try:
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield descriptor
    finally:
        path.unlink(missing_ok=True)  # before the release: afterwards another process may hold it
        os.close(descriptor)


def file_hash(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file's content as 64 hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk (`fsync`)."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open folders
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    """Flush a rename to the disk, on systems that can sync folders."""
    with contextlib.suppress(OSError):
        fsync(folder)


@contextlib.contextmanager
def _temporary(path: Path, folder: bool) -> Iterator[tuple[Path, int]]:
    """Create a temporary file or folder in the folder of `path`, open and locked. Delete it at the end of the block,
    unless it was renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        if folder:
            temporary.mkdir()
        try:
            descriptor = os.open(temporary, os.O_RDONLY if folder else os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except FileNotFoundError:
            if not folder:
                raise
            continue  # another process removed it as abandoned
        if fcntl is not None:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)  # waits for a process that removes it as abandoned
        if fcntl is None or _has_name(descriptor, temporary):
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
    """Remove unlocked temporary files and folders that killed writers of `path` left in its folder."""
    temporary_name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.tmp")
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if not temporary_name.fullmatch(entry.name):
                continue
            with contextlib.suppress(OSError):  # the writer has renamed or deleted it
                if (descriptor := _locked_file(entry.path, create=False)) in (None, -1):
                    continue
                try:
                    is_folder = entry.is_dir(follow_symlinks=False)
                    shutil.rmtree(entry.path, ignore_errors=True) if is_folder else os.unlink(entry.path)
                finally:
                    os.close(descriptor)


def _locked_file(path: str | os.PathLike[str], create: bool = True) -> int | None:
    """Lock a file or folder. Return its descriptor, None if it is locked, -1 without locks. Create a missing file."""
    if fcntl is None:
        return -1
    while True:
        mode = os.O_RDONLY if os.path.isdir(path) else os.O_RDWR | (os.O_CREAT if create else 0)
        descriptor = os.open(path, mode | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            return -1 if error.errno in _NO_LOCKS else None
        if _has_name(descriptor, path):
            return descriptor
        os.close(descriptor)  # the previous holder removed the file: retry


def _has_name(descriptor: int, path: str | os.PathLike[str]) -> bool:
    """Return whether an open file or folder (still) has this name."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False


def _exchange(a: Path, b: Path) -> None:
    """Swap the names of two folders: atomically on Linux (`renameat2`), elsewhere through a third name."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None) if os.name == "posix" else None
    at_fdcwd, rename_exchange = -100, 2  # constants of Linux
    if renameat2 is None or renameat2(at_fdcwd, os.fsencode(a), at_fdcwd, os.fsencode(b), rename_exchange) != 0:
        third = a.with_name(f"{a.name}.tmp")
        os.replace(b, third)
        os.replace(a, b)
        os.replace(third, a)
