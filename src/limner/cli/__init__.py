"""The command `limner`: a table of commands, each a module that is imported when it is called.

Heavy packages are imported only by the command that runs, so `limner --help` prints without delay. Mistakes of the
user and errors of the operating system (file, disk space, memory) print one sentence on stderr and exit with code 2.
Ctrl-C exits with code 130 and prints how to resume. `--debug` also prints the traceback.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import FrameType
from typing import NamedTuple

from limner import openmp
from limner.errors import UserError, printable, suggestion


class Command(NamedTuple):
    """A command, run by `module.main(arguments)`.

    Attributes:
        heavy: use the allocator settings of `malloc_tuning`.
        resumes: continues after an interruption, so the number of threads, which affects rounding, ignores the load.
        lower: options to lower if memory runs out.
    """

    module: str
    help: str
    heavy: bool = False
    resumes: bool = False
    lower: str = "what was asked for"


_DRAWN = "-n or --candidates"
_TRAINED = "the batch size or the width of the model in training, or raise its accumulate"
_TIMED = "--size, --batch, --candidates or --grids"

COMMANDS = {
    "demo": Command("limner.cli.demo", "train on the built-in scenes, draw, and write a report", True, True, _DRAWN),
    "draw": Command("limner.cli.draw", "draw a caption with a trained model", lower=_DRAWN),
    "edit": Command("limner.cli.edit", "draw part of a picture anew, to fit a caption", lower=_DRAWN),
    "data": Command("limner.cli.data", "make, prepare or look at training data", lower="--size or --captions"),
    "train": Command("limner.cli.train", "train a recipe on image-caption data", True, True, _TRAINED),
    "plan": Command("limner.cli.plan", "what a recipe would take on a cluster: memory, traffic, time"),
    "bench": Command("limner.cli.bench", "how fast a prior draws and trains on this machine", True, lower=_TIMED),
    "bundle": Command("limner.cli.bundle", "pack a trained model, with its name and scores, to pass on"),
    "convert": Command("limner.cli.convert", "convert published weights to our format"),
    "evaluate": Command("limner.cli.evaluate", "measure a trained model", True, lower="--candidates or --count"),
    "reproduce": Command("limner.cli.reproduce", "the papers' findings, on this machine", True, True),
    "inspect": Command("limner.cli.inspect", "look into a run: its kernels, spikes and underflow", True),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. `argv` defaults to the process's arguments."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (stays open until the process ends)
    debug = _take("--debug", arguments)
    warnings.showwarning = _show_warning
    command = COMMANDS.get(arguments[0]) if arguments else None
    try:
        code = _run(command, arguments, argv is None, debug)
        if error := _unwritten():
            raise error
        return code
    except SystemExit:  # raised by --help of a command
        _unwritten()
        raise
    except BrokenPipeError:  # the reader of the output has exited, as in `limner --help | head -1`
        _unwritten()
        return 0
    except (Exception, KeyboardInterrupt) as error:
        _unwritten()
        told = _explain(error, command)
        if told is None:
            raise
        if debug:
            print(*map(printable, "".join(traceback.format_exception(error)).splitlines()), sep="\n", file=sys.stderr)
        code, sentence = told
        print(f"limner: {printable(sentence)}", file=sys.stderr)
        return code
    finally:
        if argv is None:  # only the interpreter's shutdown remains
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _run(command: Command | None, arguments: list[str], whole: bool, debug: bool) -> int:
    """Run a command and return its exit code. `whole`: the process runs only this command."""
    if command is None:
        return _without_command(arguments)
    if whole:
        _end_imports_on_interrupt(command)
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # the default of stderr
        if not command.resumes and (message := openmp.bound_threads()) and debug:
            print(f"limner: {message}", file=sys.stderr)
        if command.heavy:
            from limner.cli.malloc_tuning import settle_allocator

            settle_allocator()
    return int(import_module(command.module).main(arguments[1:]) or 0)


def _unwritten() -> OSError | None:
    """Flush stdout. On failure return the error and redirect stdout to the null device, so that exit succeeds."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None


def help_text() -> str:
    """Return the text of `limner --help`."""
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    return (
        "usage: limner COMMAND [OPTIONS]\n\n"
        "Draws pictures from captions, and trains the models that do.\n\n"
        f"commands:\n{lines}\n\n"
        'try:      limner draw "a small red circle above a large blue square on a gray background"\n'
        "more:     limner COMMAND --help\n"
        "options:  --version, and with any command --debug, which shows tracebacks\n"
    )


def choose(name: str, options: Sequence[str], what: str) -> str:
    """Return `name`. Raises `UserError` with the nearest option if `name` is not in `options`."""
    if name in options:
        return name
    raise UserError(f"there is no {what} {name!r}: {suggestion(name, options)}")


def dispatch(prog: str, kinds: Mapping[str, Callable[[Sequence[str]], None]], argv: Sequence[str]) -> None:
    """Run a subcommand; its docstring's first line is its help. Raises `UserError` if it is unknown."""
    if argv and argv[0] not in ("-h", "--help"):
        kinds[choose(argv[0], list(kinds), prog.split()[-1] + " command")](argv[1:])
        return
    width = max(map(len, kinds))
    lines = [f"  {name:<{width}}  {(kind.__doc__ or '').splitlines()[0]}" for name, kind in kinds.items()]
    print(f"usage: {prog} WHAT ... [OPTIONS]\n\n" + "\n".join(lines) + f"\n\nmore: {prog} WHAT --help")
    if not argv:
        raise UserError(f"say which: {', '.join(kinds)}")


def _without_command(arguments: list[str]) -> int:
    if not arguments:
        print(help_text(), end="", file=sys.stderr)
        return 2
    if arguments[0] in ("-h", "--help", "help"):
        print(help_text(), end="")
    elif arguments[0] in ("-V", "--version"):
        from limner.version import __version__

        print(f"limner {__version__}")
    else:
        kind = "option" if arguments[0].startswith("-") else "command"
        choose(arguments[0], ["--help", "--version"] if kind == "option" else list(COMMANDS), kind)
    return 0


def _take(flag: str, arguments: list[str]) -> bool:
    """Remove `flag` from the arguments before `--`. Return True if it was there."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    found = [i for i in range(end) if arguments[i] == flag]
    for i in reversed(found):
        del arguments[i]
    return bool(found)


def _explain(error: BaseException, command: Command | None) -> tuple[int, str] | None:
    """Return exit code and message of an error that the user can fix; None for a bug in the program."""
    if isinstance(error, UserError):
        return 2, str(error)
    if isinstance(error, KeyboardInterrupt):
        return 130, _interrupted(command)
    loop = sys.modules.get("limner.training.loop")  # imported only by commands that train
    if loop is not None and isinstance(error, loop.Interrupted):
        return 130, str(error)
    if isinstance(error, ImportError):
        return 2, f"a package cannot be imported ({error}): install limner again"
    if told := _of_system(error):
        return 2, told
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error))):
        whose = "the GPU's" if "CUDA" in str(error) else "this machine's"
        lower = command.lower if command else "what was asked for"
        return 2, f"{whose} memory does not suffice: lower {lower}"
    return None


def _interrupted(command: Command | None) -> str:
    resumes = command is not None and command.resumes
    return "interrupted; the same command goes on from here" if resumes else "interrupted"


def _end_imports_on_interrupt(command: Command | None) -> None:
    """Let Ctrl-C end the process during an import; at other times it raises KeyboardInterrupt.

    Importing torch or numpy turns a KeyboardInterrupt into other errors, or prints it and continues.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        while frame:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                os.write(2, f"limner: {_interrupted(command)}\n".encode())
                os._exit(130)
            frame = frame.f_back
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, handle)


# Torch's messages for a failed allocation, or a size beyond any memory.
_NO_MEMORY = re.compile("can't allocate memory|not enough memory|out of memory|Storage size calculation overflowed")


def _of_system(error: BaseException) -> str | None:
    """Return the message of an operating system error, also of one that safetensors wraps; None for other errors."""
    if not isinstance(error, OSError):
        code = re.search(r"Os \{ code: (\d+)", str(error)) if type(error).__name__ == "SafetensorError" else None
        if code is None:
            return None
        error = OSError(int(code[1]), os.strerror(int(code[1])))
    says = error.strerror or str(error) or type(error).__name__
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        says += ", so what was being written is not there: make room and give the same command again"
    where = next((name for name in (error.filename, error.filename2) if isinstance(name, (str, bytes))), None)
    return says if where is None else f"{os.fsdecode(where)}: {says}"


_shown: Counter[tuple[str, int]] = Counter()  # number of warnings per file and line of the source


def _show_warning(
    message: Warning | str, category: object, filename: str, lineno: int, *_: object, **__: object
) -> None:
    """Print a warning as one line, without its place in the source, at most three times per place."""
    _shown[filename, lineno] += 1
    if _shown[filename, lineno] <= 3:
        print(f"limner: warning: {printable(message)}", file=sys.stderr)
    elif _shown[filename, lineno] == 4:
        print("limner: warning: and more of this kind", file=sys.stderr)
