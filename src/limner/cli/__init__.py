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
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from types import FrameType
from typing import Any, NamedTuple, get_type_hints

from limner import openmp
from limner.errors import UserError, did_you_mean, escape_control


class Command(NamedTuple):
    """A command, run by `module.main(arguments)`.

    Attributes:
        heavy: use the allocator settings of `malloc_tuning`.
        resumes: continues after an interruption, so the number of threads, which affects rounding, ignores the load.
        oom_hint: options to lower if memory runs out.
    """

    module: str
    help: str
    heavy: bool = False
    resumes: bool = False
    oom_hint: str = "its options"


TORCH_EXTRA = ("torch", "safetensors", "jaxtyping", "py3langid")  # packages of the extra `torch`
_DRAW_HINT = "-n or --candidates"
_TRAIN_HINT = "the batch size or the model width, or raise accumulate"
_BENCH_HINT = "--size, --batch, --candidates or --grids"

COMMANDS = {
    "demo": Command("limner.cli.demo", "train on built-in scenes, draw, and write a report", True, True, _DRAW_HINT),
    "draw": Command("limner.cli.draw", "draw a caption with a trained model", oom_hint=_DRAW_HINT),
    "edit": Command("limner.cli.edit", "redraw a part of a picture to fit a caption", oom_hint=_DRAW_HINT),
    "serve": Command("limner.cli.serve", "draw for other programs and on a page", oom_hint="--max-requests"),
    "vote": Command("limner.cli.vote", "let people compare pictures of models on a page"),
    "data": Command("limner.cli.data", "make, prepare or show training data", oom_hint="--size or --captions"),
    "train": Command("limner.cli.train", "train a recipe on image-caption data", True, True, _TRAIN_HINT),
    "finetune": Command("limner.cli.finetune", "teach a trained model new pictures", True, True, "--batch-size"),
    "detector": Command("limner.cli.detector", "train an object detector", True, True, "--training.batch-size"),
    "plan": Command("limner.cli.plan", "estimate memory, traffic and time of a recipe on a cluster"),
    "bench": Command("limner.cli.bench", "measure how fast a prior draws and trains", True, oom_hint=_BENCH_HINT),
    "bundle": Command("limner.cli.bundle", "pack a trained model with a name and scores, for publication"),
    "export": Command("limner.cli.export", "write files that draw without torch", oom_hint="the model's size"),
    "convert": Command("limner.cli.convert", "convert published weights to limner's format"),
    "evaluate": Command("limner.cli.evaluate", "measure a trained model", True, oom_hint="--candidates or --count"),
    "reproduce": Command("limner.cli.reproduce", "repeat experiments of the papers on this machine", True, True),
    "profile": Command("limner.cli.profile", "report where the time and memory of training go", oom_hint="the steps"),
    "inspect": Command(
        "limner.cli.inspect", "inspect a run: kernels, loss spikes, gradient underflow, autograd graph", True
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. `argv` defaults to the process's arguments."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (stays open until the process ends)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    debug = "--debug" in arguments[:end]
    arguments[:end] = [word for word in arguments[:end] if word != "--debug"]
    warnings.showwarning = show_warning
    command = COMMANDS.get(arguments[0]) if arguments else None
    try:
        code = _run(command, arguments, argv is None, debug)
        if error := _flush_stdout():
            raise error
        return code
    except SystemExit:  # raised by --help of a command
        _flush_stdout()
        raise
    except BrokenPipeError:  # the reader of the output has exited, as in `limner --help | head -1`
        _flush_stdout()
        return 0
    except (Exception, KeyboardInterrupt) as error:
        _flush_stdout()
        explanation = _explain(error, command)
        if explanation is None:
            raise
        if debug:
            lines = "".join(traceback.format_exception(error)).splitlines()
            print(*map(escape_control, lines), sep="\n", file=sys.stderr)
        code, message = explanation
        print(f"limner: {escape_control(message)}", file=sys.stderr)
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
            from limner.cli.malloc_tuning import restart_with_malloc_tunables

            restart_with_malloc_tunables()
    return int(import_module(command.module).main(arguments[1:]) or 0)


def _flush_stdout() -> OSError | None:
    """Flush stdout. On failure return the error and redirect stdout to the null device, so that exit succeeds."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None


def two_columns(help_by_name: Mapping[str, str]) -> str:
    """Return lines of names and texts."""
    width = max(map(len, help_by_name))
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in help_by_name.items())


def validate_choice(name: str, options: Sequence[str], kind: str) -> str:
    """Return `name`. Raises `UserError` with the closest option if `name` is not in `options`."""
    if name in options:
        return name
    raise UserError(f"unknown {kind} {name!r}: {did_you_mean(name, options)}")


def command_name(function: Callable[..., Any]) -> str:
    """Return the name of the subcommand that a function runs."""
    return function.__name__.replace("_", "-")


def run_subcommand(prog: str, functions: Iterable[Callable[[Any], None]], argv: Sequence[str]) -> None:
    """Run a subcommand: a function whose parameter `options` is annotated with the dataclass of its options.

    Its help is the function's docstring. Raises `UserError` if it is unknown.
    """
    from limner.cli.arguments import parse

    commands = {command_name(function): function for function in functions}
    if argv and argv[0] not in ("-h", "--help"):
        name = validate_choice(argv[0], list(commands), prog.split()[-1] + " command")
        commands[name](parse(get_type_hints(commands[name])["options"], argv[1:], f"{prog} {name}"))
        return
    listed = two_columns({name: function.__doc__ or "" for name, function in commands.items()})
    print(f"usage: {prog} COMMAND [OPTIONS]\n\n{listed}\n\nmore: {prog} COMMAND --help")
    if not argv:
        raise UserError(f"{prog} needs a command: {', '.join(commands)}")


def _without_command(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(
            "usage: limner COMMAND [OPTIONS]\n\nDraw pictures from captions, and train the models for it.\n\n"
            f"commands:\n{two_columns({name: command.help for name, command in COMMANDS.items()})}\n\n"
            'try:      limner draw "a small red circle above a large blue square on a gray background"\n'
            "more:     limner COMMAND --help\noptions:  --version; with any command, --debug shows tracebacks",
            file=sys.stdout if arguments else sys.stderr,
        )
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        from limner.version import __version__

        print(f"limner {__version__}")
    else:
        kind = "option" if arguments[0].startswith("-") else "command"
        validate_choice(arguments[0], ["--help", "--version"] if kind == "option" else list(COMMANDS), kind)
    return 0


def _explain(error: BaseException, command: Command | None) -> tuple[int, str] | None:
    """Return exit code and message of an error that the user can fix; None for a bug in the program."""
    if isinstance(error, UserError):
        return 2, str(error)
    if isinstance(error, KeyboardInterrupt):
        return 130, _interrupted(command)
    loop = sys.modules.get("limner.training.loop")  # imported only by commands that train
    if loop is not None and isinstance(error, loop.Interrupted):
        return 130, str(error)
    if isinstance(error, ImportError) and error.name in TORCH_EXTRA:
        return 2, f"this command needs the package {error.name}: pip install 'limner[torch]'"
    if isinstance(error, ImportError):
        return 2, f"a package cannot be imported ({error}): install limner again"
    if message := _system_error_message(error):
        return 2, message
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error))):
        device = "the GPU" if "CUDA" in str(error) else "this machine"
        return 2, f"{device} is out of memory: lower {(command or Command('', '')).oom_hint}"
    return None


def _interrupted(command: Command | None) -> str:
    resumes = command is not None and command.resumes
    return "interrupted: the same command resumes the work" if resumes else "interrupted"


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
_OUT_OF_MEMORY = re.compile("can't allocate memory|not enough memory|out of memory|Storage size calculation overflowed")


def _system_error_message(error: BaseException) -> str | None:
    """Return the message of an operating system error, also of one that safetensors wraps; None for other errors."""
    if not isinstance(error, OSError):
        code = re.search(r"Os \{ code: (\d+)", str(error)) if type(error).__name__ == "SafetensorError" else None
        if code is None:
            return None
        error = OSError(int(code[1]), os.strerror(int(code[1])))
    message = error.strerror or str(error) or type(error).__name__
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        message += ", so the write failed: free some space and run the same command again"
    path = next((name for name in (error.filename, error.filename2) if isinstance(name, (str, bytes))), None)
    return message if path is None else f"{os.fsdecode(path)}: {message}"


warning_counts: Counter[tuple[str, int]] = Counter()  # per file and line of the source; tests reset it


def show_warning(
    message: Warning | str, category: object, filename: str, lineno: int, *_: object, **__: object
) -> None:
    """Print a warning as one line, without its place in the source, at most three times per place."""
    warning_counts[filename, lineno] += 1
    if (count := warning_counts[filename, lineno]) <= 4:
        text = "further warnings of this kind are not shown" if count == 4 else escape_control(message)
        print(f"limner: warning: {text}", file=sys.stderr)
