"""Renderer of untrusted SVG: documents are checked, then drawn by resvg in a child process with limits.

Icon sets are untrusted, and an SVG document can name files and run scripts. So only elements that icons use are
allowed, references must point into the same document, and a document type (and so an entity) is rejected.

The cost of drawing a document cannot be read from it: 70 bytes of dashes take a fifth of a second; nested references,
arcs and filters take hours, all memory or the whole stack. resvg is native code that Python cannot interrupt. So one
child process draws all documents in order, and a new child replaces one that a document has ended. The system counts
processor time and ends the child by SIGPROF, so results do not depend on other load.
"""

from __future__ import annotations

import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from PIL import Image, PngImagePlugin

from limner.data.sample import Rejected
from limner.errors import UserError

MAX_BODY = 1 << 20  # characters of one icon; the longest of ten sets has 405,717
MAX_MEMORY = 1 << 31  # bytes of address space on top of Python and its packages

_NAMESPACES = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
_SVG, _HREFS = "{http://www.w3.org/2000/svg}", ("href", "{http://www.w3.org/1999/xlink}href")
_ELEMENTS = frozenset(  # used by ten icon sets
    ("svg", "g", "defs", "use", "symbol", "title", "desc", "clipPath", "mask", "linearGradient", "radialGradient",
     "stop", "path", "rect", "circle", "ellipse", "line", "polyline", "polygon", "filter", "feBlend", "feColorMatrix",
     "feComposite", "feFlood", "feGaussianBlur", "feMerge", "feMergeNode", "feOffset")
)  # fmt: skip
_REFERENCE = re.compile(r"url\(\s*['\"]?\s*([^'\")\s]*)")
_RENDERED, _REJECTED = b"+", b"-"  # first byte of an answer of the child
_USER_ERROR = 2  # exit code of the child
_TOP_PAD = 1 << 26  # bytes that glibc keeps: without them each drawing causes 60 page faults


def document(
    body: str, box: tuple[float, float, float, float], turns: int = 0, mirror: tuple[int, int] = (1, 1)
) -> str:
    """Return an SVG document with the elements `body`, drawn in `box` (left, top, width, height).

    `mirror` is -1 for each axis to flip (x, y). `turns` quarter turns clockwise follow. Raises `Rejected` if `body` is
    longer than `MAX_BODY`.
    """
    if len(body) > MAX_BODY:
        raise Rejected("SVG too long")
    left, top, width, height = box
    x, y = (height, width) if turns % 2 else (width, height)
    transform = (
        f"rotate({90 * turns}) scale({mirror[0]} {mirror[1]}) translate({-left - width / 2} {-top - height / 2})"
    )
    return f'<svg {_NAMESPACES} viewBox="{-x / 2} {-y / 2} {x} {y}"><g transform="{transform}">{body}</g></svg>'


def draw(svg: str, size: int, background: str = "white", margin: int = 0) -> np.ndarray:
    """Draw a document in a square, uint8 [size, size, 3], with `margin` empty pixels on each side; `background` is a
    CSS color. Raises `Rejected` for forbidden or invalid documents, `UserError` without resvg. Time and memory are
    unlimited, and resvg may crash."""
    _check(svg)
    inner = size - 2 * margin
    try:
        import resvg_py
    except ImportError:
        raise UserError('drawing icons needs the resvg-py package: pip install "limner[svg]"') from None
    try:
        png = resvg_py.svg_to_bytes(svg, width=inner, height=inner, background=background, skip_system_fonts=True)
    except BaseException as error:  # resvg's panics do not derive from `Exception`
        if isinstance(error, ValueError | OSError) or type(error).__name__ == "PanicException":
            raise Rejected("SVG that cannot be drawn") from None
        raise
    picture = PngImagePlugin.PngImageFile(io.BytesIO(bytes(png))).convert("RGB")
    canvas = Image.new("RGB", (size, size), background)  # larger with a margin, or for an icon that is not square
    canvas.paste(picture, ((size - picture.width) // 2, (size - picture.height) // 2))
    return np.asarray(canvas)


def without_metadata(text: str) -> str:
    """Return a document of an editor without XML declaration, document type, comments, metadata and elements of other
    namespaces. Raises `Rejected` for invalid XML, and for a document that declares entities."""
    try:
        root = ElementTree.fromstring("" if "<!ENTITY" in text else re.sub(r"<!DOCTYPE[^<>\[]*>", "", text))
        for parent in root.iter():
            drawn = [x for x in parent if x.tag.startswith(_SVG) or not x.tag.startswith("{")]
            parent[:] = [x for x in drawn if x.tag != f"{_SVG}metadata"]
        return ElementTree.tostring(root, "unicode")
    except (ElementTree.ParseError, ValueError, RecursionError):
        raise Rejected("SVG that is not XML, or too deeply nested") from None


def _check(text: str) -> None:
    """Raise `Rejected` for invalid XML, a declaration, a forbidden element or an external reference."""
    if "<!" in text or "<?" in text:  # a document type, an entity, a processing instruction
        raise Rejected("SVG with a declaration")
    try:
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError):
        raise Rejected("SVG that is not XML") from None
    for element in root.iter():
        if (name := str(element.tag).removeprefix(_SVG)) not in _ELEMENTS:
            shown = name if re.fullmatch(r"[A-Za-z]{1,20}", name) else "another kind"
            raise Rejected(f"SVG with an element that icons do not need: {shown}")
        for key, value in element.items():
            targets = [value.strip()] if key in _HREFS else []
            if not all(target.startswith("#") for target in (*targets, *_REFERENCE.findall(value))):
                raise Rejected("SVG that refers to something outside")


class SVGRenderer:
    """Context manager of the child process.

    Args:
        seconds: limit of processor time for a small drawing; 1,024 pixels per side add 21 seconds. The slowest drawing
            of fluent-emoji, whose filters make it the slowest set, takes 0.03 seconds at 64 pixels and 2.8 at 1,024.
    """

    def __init__(self, seconds: float = 2.0) -> None:
        self.seconds = seconds

    def render(self, svg: str, size: int, background: str = "white", margin: int = 0) -> np.ndarray:
        """Run `draw` in the child. Also raises `Rejected` if the document takes too long or ends the child."""
        try:
            limit = self.seconds + size**2 / 50_000
            self._connection.send_bytes(json.dumps((limit, svg, size, background, margin)).encode())
            answer = self._connection.recv_bytes()
        except (EOFError, OSError):
            self.__exit__()
            timed_out = self.process.returncode == -signal.SIGPROF
            self.__enter__()
            reason = "takes too long" if timed_out else "crashes resvg or takes too much memory"
            raise Rejected(f"SVG that {reason}") from None
        if answer.startswith(_REJECTED):
            raise Rejected(answer[1:].decode())
        return np.frombuffer(answer, np.uint8, offset=1).reshape(size, size, 3)

    def __enter__(self) -> SVGRenderer:
        """Start a child. Raises `UserError` if it cannot draw, for example without resvg."""
        self._connection, child_end = Pipe()
        command = [sys.executable, "-P", "-m", "limner.tasks.svg", str(child_end.fileno())]
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
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self.process.kill()
        self.process.wait()


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
