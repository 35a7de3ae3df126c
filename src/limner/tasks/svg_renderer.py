"""Draw SVG documents in a child process, each within limits of processor time and memory.

The cost of drawing a document cannot be read from it: 70 bytes of dashes take a fifth of a second; nested references,
arcs and filters take hours, all memory or the whole stack. resvg is native code that Python cannot interrupt. So one
child process draws all documents in order, and a new child replaces one that a document has ended.

The system counts processor time and ends the child by SIGPROF, so results do not depend on other load.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from limner.data.sample import Rejected
from limner.errors import UserError
from limner.tasks.svg import document, draw

MAX_MEMORY = 1 << 31  # bytes of address space on top of Python and its packages
_RENDERED, _REJECTED = b"+", b"-"
_USER_ERROR = 2  # exit code
_TOP_PAD = 1 << 26  # bytes that glibc keeps: without them each drawing causes 60 page faults


class SVGRenderer:
    """Context manager of the child process.

    Args:
        seconds: limit of processor time for a small drawing; 1,024 pixels per side add 21 seconds. The slowest drawing
            of fluent-emoji, whose filters make it the slowest set, takes 0.03 seconds at 64 pixels and 2.8 at 1,024.
    """

    def __init__(self, seconds: float = 2.0) -> None:
        self.seconds = seconds

    def render(self, svg: str, size: int, background: str = "white", margin: int = 0) -> np.ndarray:
        """Run `svg.draw` in the child. Also raises `Rejected` if the document takes too long or ends the child."""
        try:
            limit = self.seconds + size**2 / 50_000
            self._connection.send_bytes(json.dumps((limit, svg, size, background, margin)).encode())
            answer = self._connection.recv_bytes()
        except (EOFError, OSError):
            timed_out = self._stop() == -signal.SIGPROF
            self._start()
            reason = "takes too long" if timed_out else "crashes resvg or takes too much memory"
            raise Rejected(f"SVG that {reason}") from None
        if answer.startswith(_REJECTED):
            raise Rejected(answer[1:].decode())
        return np.frombuffer(answer, np.uint8, offset=1).reshape(size, size, 3)

    def __enter__(self) -> SVGRenderer:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _start(self) -> None:
        """Start a child. Raises `UserError` if it cannot draw, for example without resvg."""
        self._connection, child_end = Pipe()
        command = [sys.executable, "-P", "-m", "limner.tasks.svg_renderer", str(child_end.fileno())]
        environment = {"PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_TOP_PAD_": str(_TOP_PAD)}
        with child_end:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                env={**os.environ, **environment}, pass_fds=(child_end.fileno(),),
                start_new_session=True,  # Ctrl-C must reach only the parent
            )  # fmt: skip
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            message = stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
        try:
            self._connection.recv_bytes()
        except (EOFError, OSError):
            code = self.process.wait()
            if code != _USER_ERROR:
                message = f"the SVG process does not start ({message or f'code {code}'}): reinstall limner"
            raise UserError(message) from None

    def _stop(self) -> int:
        """End the child and return its exit code, negative for a signal."""
        self._connection.close()
        self.process.kill()
        return self.process.wait()


def main(descriptor: int) -> None:
    """Draw the documents received through a connection until it closes."""
    pages = Path("/proc/self/statm")  # Linux only; other systems do not enforce RLIMIT_AS
    used = int(pages.read_text().split()[0]) * resource.getpagesize() if pages.exists() else 0
    for kind, limit in ((resource.RLIMIT_AS, used + MAX_MEMORY), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError):  # the limit is lower already
            resource.setrlimit(kind, (limit, limit))
    with Connection(descriptor) as connection, suppress(EOFError, BrokenPipeError):
        try:
            draw(document("", (0, 0, 1, 1)), 8)
        except UserError as error:
            print(error, file=sys.stderr)
            sys.exit(_USER_ERROR)
        connection.send_bytes(b"ready")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hides resvg's panics; the parent reads until here
        while True:
            seconds, *arguments = json.loads(connection.recv_bytes())
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                answer = _RENDERED + draw(*arguments).tobytes()
            except Rejected as rejection:
                answer = _REJECTED + rejection.reason.encode()
            connection.send_bytes(answer)


if __name__ == "__main__":
    main(int(sys.argv[1]))
