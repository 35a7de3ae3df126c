"""Commands of limner as real processes that start in milliseconds, watched and killed.

A *server* (`python processes.py SOCKET`) has imported all of limner, and no thread runs in it. For each request it
forks a child that is then like `python -m limner ...`: own folder, environment, arguments, descriptors and
interpreter's end. `shim.c` is loaded in it, which counts what it changes in a folder and kills it at a given change.
Python processes that such a child starts (`sys.executable [-P] -m MODULE`) come from the server, too, by `python_here`.

The tests' side is `Server`: `start` gives a `Process`, `run` waits for it.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
GIBIBYTE = 1 << 30
_HELPER = "LIMNER_ATTACK_HELPER"  # what a helper process is watched for
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
_SERVER = "LIMNER_ATTACK_SERVER"


# ---------------------------------------------------------------------------- the tests' side


@dataclass(frozen=True)
class Ended:
    """A process that has ended. `code` is negative for a signal; `hung`: it was killed because its time was up."""

    argv: tuple[str, ...]
    code: int
    out: str
    err: str
    seconds: float
    peak: int
    hung: bool
    log: tuple[str, ...] = ()
    helper_log: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The command line and how it went, for the message of a failure."""
        words = " ".join(w if w.isprintable() and w and " " not in w else repr(w) for w in self.argv)
        words = words if len(words) < 2_000 else words[:2_000] + " ..."
        how = "hung" if self.hung else f"code {self.code}"
        return f"$ limner {words}\n{how}, {self.seconds:.1f} s, {self.peak >> 20} MiB\n{self.err[-3_000:]}"


class Process:
    """A command that runs."""

    def __init__(self, argv: Sequence[str], link: socket.socket, place: Path) -> None:
        self.argv, self.link, self.place, self.begun = tuple(argv), link, place, time.monotonic()
        self.lines = link.makefile("r")
        self.pid = json.loads(self.lines.readline())["pid"]

    def kill(self, number: int = signal.SIGKILL, pid: int = 0) -> None:
        """Send it, or its helper process `pid`, a signal; nothing happens if that has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid or self.pid, number)

    def ended_or_interrupted(self, seconds: float, patience: float) -> Ended:
        """Its end, or, after some seconds, what comes of Ctrl-C (a second and third time, if need be)."""
        deadline = time.monotonic() + seconds
        while select.select([self.link], [], [], max(0.0, deadline - time.monotonic()))[0] == []:
            self.kill(signal.SIGINT)
            deadline = time.monotonic() + patience / 4
            if deadline > self.begun + seconds + patience:
                break
        return self.ended(seconds + patience)

    def ended(self, timeout: float = 120.0) -> Ended:
        """Wait for its end, and kill it after `timeout` seconds from its start."""
        hung = False
        self.link.settimeout(max(0.01, self.begun + timeout - time.monotonic()))
        try:
            line = self.lines.readline()
        except TimeoutError:
            hung = True
            self.kill()
            self.link.settimeout(60)
            self.lines = self.link.makefile("r")
            line = self.lines.readline()
        end = json.loads(line)
        self.lines.close()
        self.link.close()
        out, err = ((self.place / name).read_bytes().decode("utf-8", "replace") for name in ("out", "err"))
        logs = [_lines(self.place / name) for name in ("log", "helper")]
        return Ended(self.argv, end["code"], out, err, time.monotonic() - self.begun, end["peak"], hung, *logs)


def _lines(path: Path) -> tuple[str, ...]:
    text = path.read_bytes().decode("utf-8", "backslashreplace") if path.exists() else ""
    return tuple(line for line in text.split("\n") if line)  # a path may have other ends of lines in it


class Server:
    """The process that forks commands; `folder` is for its own files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0
        library = folder / "shim.so"
        subprocess.run(["cc", "-O2", "-Wall", "-shared", "-fPIC", "-o", library, HERE / "shim.c", "-ldl"], check=True)
        self.path = folder / "socket"
        one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        environment = {
            **os.environ,
            **one,
            "LD_PRELOAD": str(library),
            "PYTHONPATH": str(SOURCE),
            "GLIBC_TUNABLES": "glibc.malloc.check=0",  # set, so that heavy commands do not start again
            "OMP_WAIT_POLICY": "passive",  # where there are more threads than cores, to spin is to wait for oneself
            "PYTHONFAULTHANDLER": "1",
            "COLUMNS": "200",
        }
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(self.path)], env=environment, stdin=subprocess.PIPE
        )
        deadline = time.monotonic() + 120
        while not self.path.exists():
            assert self.process.poll() is None and time.monotonic() < deadline, "the server of processes did not start"
            time.sleep(0.02)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()  # it ends with its standard input
        self.process.wait(60)

    def start(
        self,
        argv: Sequence[object],
        cwd: Path,
        *,
        threads: int = 1,
        root: Path | None = None,
        at: int = 0,
        helper_at: int = 0,
        full: bool = False,
        log: bool = False,
        memory: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Process:
        """Start `limner ARGV` in the folder `cwd`.

        Args:
            threads: of torch.
            root: changes below this folder are counted, and number `at` kills the process, or number `helper_at` of
                a helper process kills that.
            full: the disk is full from number `at` on, instead.
            log: note each change of files, and each file read.
            memory: bytes of address space beyond what the server has.
        """
        self.number += 1
        place = self.folder / f"{self.number % 64:02d}"  # of the last few processes
        place.mkdir(exist_ok=True)
        for name in ("log", "helper"):
            (place / name).unlink(missing_ok=True)
        words = [os.fspath(word) if isinstance(word, Path) else str(word) for word in argv]
        request = {
            "module": "limner",
            "argv": words,
            "cwd": str(cwd),
            "environment": {**(environment or {}), "OMP_NUM_THREADS": str(threads)},
            "threads": threads,
            "root": str(root) if root else "",
            "at": at,
            "full": full,
            "log": str(place / "log") if log else "",
            "memory": memory,
        }
        if root and (helper_at or log):
            log_of_helper = str(place / "helper") if log else ""
            request["environment"][_HELPER] = json.dumps({"root": str(root), "at": helper_at, "log": log_of_helper})
        link = socket.socket(socket.AF_UNIX)
        link.connect(str(self.path))
        with open(os.devnull, "rb") as nothing, open(place / "out", "wb") as out, open(place / "err", "wb") as err:
            _send(link, request, [(i, file.fileno()) for i, file in enumerate((nothing, out, err))])
        return Process(words, link, place)

    def run(self, argv: Sequence[object], cwd: Path, *, timeout: float = 120.0, **options: object) -> Ended:
        """`start`, and wait for the end."""
        return self.start(argv, cwd, **options).ended(timeout)  # type: ignore[arg-type]


def _send(link: socket.socket, request: Mapping[str, object], descriptors: Sequence[tuple[int, int]]) -> None:
    """The request, with open files and the numbers that they shall have."""
    data = json.dumps({**request, "descriptors": [number for number, _ in descriptors]}).encode()
    handles = array.array("i", [handle for _, handle in descriptors])
    link.sendmsg([len(data).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, handles)])
    link.sendall(data)


def _receive(link: socket.socket) -> tuple[dict | None, list[int]]:
    """A request and its files; None if the sender was killed before it sent all of it."""
    head, extra, *_ = link.recvmsg(8, socket.CMSG_SPACE(4 * 64))
    handles = array.array("i")
    for _, _, data in extra:
        handles.frombytes(data)
    data, more = b"", head
    while more and len(data) < int.from_bytes(head, "little"):
        more = link.recv(1 << 20)
        data += more
    return json.loads(data) if more else None, list(handles)


# ---------------------------------------------------------------------------- in the server


_STUB = """#!{python} -IS
import sys
sys.path.insert(0, {here!r})
sys.path.insert(0, {standard!r})
from processes import python_here
python_here()
"""


def python_here() -> None:
    """Stand in for `sys.executable` of a child of the server: fork the server with this process's arguments,
    environment and open files, and end with the fork's exit code or signal."""
    mark, module, *arguments = [word for word in sys.argv[1:] if word != "-P"]
    assert mark == "-m", sys.argv
    handles = [int(name) for name in os.listdir("/proc/self/fd")]
    link = socket.socket(socket.AF_UNIX)
    link.connect(os.environ[_SERVER])
    request = {
        "module": module,
        "argv": arguments,
        "cwd": os.getcwd(),
        "environment": dict(os.environ),
        "threads": int(os.environ.get("OMP_NUM_THREADS", "1")),
        "memory": None,
        "helper": True,
        **json.loads(os.environ.get(_HELPER, '{"root": "", "at": 0, "log": ""}')),
    }
    descriptors = []
    for handle in handles:
        try:
            os.fstat(handle)
        except OSError:
            continue
        if handle != link.fileno():
            descriptors.append((handle, handle))
    _send(link, request, descriptors)
    for handle, _ in descriptors:
        os.close(handle)  # a pipe must close when its true owner ends
    lines = link.makefile("r")
    pid = json.loads(lines.readline())["pid"]
    for number in _INTERRUPTS:
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    code = json.loads(lines.readline())["code"]
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


# What commands import on their way. (Not pyarrow: it starts a thread.)
_ALSO = ("torch._dynamo", "torch.optim._muon", "simplejpeg", "emoji", "py3langid", "tyro", "rich.progress")


def serve(path: str) -> None:
    """Fork a child for each request until standard input ends."""
    import pkgutil
    from importlib import import_module

    import limner

    for module in pkgutil.walk_packages(limner.__path__, "limner."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    for name in _ALSO:
        try:
            import_module(name)
        except ImportError:
            continue
    sys.path.insert(1, str(HERE))
    import_module("miniature")
    from PIL import Image

    Image.init()
    from limner.data.filters import Filters

    Filters().captions(["a caption of several words loads the model that tells languages"])
    assert len(os.listdir("/proc/self/task")) == 1, "a fork of several threads is no process like others"
    stub = Path(path).with_name("python")
    standard = sysconfig.get_path("stdlib")
    stub.write_text(_STUB.format(python=os.path.realpath(sys.executable), here=str(HERE), standard=standard))
    stub.chmod(0o755)
    os.environ[_SERVER] = path

    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path + ".new")
    listener.listen(64)
    os.rename(path + ".new", path)
    links: dict[int, socket.socket] = {}
    helpers: dict[socket.socket, int] = {}
    while True:
        ready, _, _ = select.select([listener, woken, 0, *helpers], [], [])
        if 0 in ready and not os.read(0, 1):
            break
        if woken in ready:
            os.read(woken, 1 << 10)
            while links:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if not pid:
                    break
                end = {"code": os.waitstatus_to_exitcode(status), "peak": usage.ru_maxrss << 10}
                with links.pop(pid) as link:
                    helpers.pop(link, None)
                    try:
                        link.sendall((json.dumps(end) + "\n").encode())
                    except OSError:
                        continue
        for link in [link for link in ready if link in helpers]:  # its `python_here` was killed
            os.kill(helpers.pop(link), signal.SIGKILL)
        if listener in ready:
            link, _ = listener.accept()
            request, handles = _receive(link)
            pid = os.fork() if request else -1
            if pid == 0:
                signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)  # until it is the command
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _become(request, handles, stub, [listener.fileno(), woken, wakes, link.fileno()])
            for handle in handles:
                os.close(handle)
            if not request:
                link.close()
                continue
            links[pid] = link
            if request.get("helper"):
                helpers[link] = pid
            with contextlib.suppress(OSError):  # the sender may have been killed since: then its link ends, see above
                link.sendall((json.dumps({"pid": pid}) + "\n").encode())
    for pid in links:
        os.kill(pid, signal.SIGKILL)
    listener.close()


def _become(request: dict, handles: list[int], stub: Path, inherited: list[int]) -> None:
    """In the forked child: be `python -m MODULE ARGV`. Does not return."""
    code = 1
    try:
        high = [os.dup2(handle, 900 + i) for i, handle in enumerate(handles)]
        os.closerange(0, 900)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND) if request["log"] else -1
        log = os.dup2(log, 899) if log >= 0 else -1
        for number, handle in zip(request["descriptors"], high, strict=True):
            os.dup2(handle, number, inheritable=True)
            os.close(handle)
        sys.stdin, sys.stdout, sys.stderr = (
            open(i, how, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
            for i, (how, errors) in enumerate((("r", "strict"), ("w", "strict"), ("w", "backslashreplace")))
        )
        os.chdir(request["cwd"])
        os.environ.update(request["environment"])
        if not request.get("helper"):
            os.environ.pop("LD_PRELOAD", None)
        for number in _INTERRUPTS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        if request["memory"]:
            most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + request["memory"]
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        import torch

        torch.set_num_threads(request["threads"])
        sys.executable, sys.argv = str(stub), [request["module"], *request["argv"]]
        from miniature import small

        small()
        shim = ctypes.CDLL(None)
        shim.attack_begin(
            os.fsencode(request["root"]), ctypes.c_long(request["at"]), int(request.get("full", False)), log
        )
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTS)
        code = _run(request["module"])
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def _run(module: str) -> int:
    """The module as `__main__`, and what Python does at the end of a process."""
    import runpy
    import threading
    import traceback

    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=False)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if leaving.code is not None and not isinstance(leaving.code, int):
            print(leaving.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # waits for threads other than daemons
    return code


if __name__ == "__main__":
    serve(sys.argv[1])
