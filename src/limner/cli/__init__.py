"""The command `limner`: a table of commands, each a module that is imported when it is called.

Nothing heavy is imported before that, so `limner --help` answers at once. What every command has in
common is here: a user's mistake is one sentence on stderr and exit code 2, Ctrl-C is exit code 130 with
a sentence on how to go on, and `--debug` shows the traceback of either.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import NamedTuple

from limner.errors import UserError


class Command(NamedTuple):
    """`module.main(arguments)` runs it. `resumes`: the same call goes on after an interruption."""

    module: str
    help: str
    heavy: bool = False
    resumes: bool = False


COMMANDS = {
    "demo": Command("limner.cli.demo", "train on the built-in scenes, draw, and write a report", True, True),
    "draw": Command("limner.cli.draw", "draw a caption with a trained model"),
    "edit": Command("limner.cli.edit", "draw part of a picture anew, to fit a caption"),
    "data": Command("limner.cli.data", "make, prepare or look at training data"),
    "train": Command("limner.cli.train", "train a recipe on image-caption data", True, True),
    "plan": Command("limner.cli.plan", "what a recipe would take on a cluster: memory, traffic, time"),
    "bench": Command("limner.cli.bench", "how fast a prior draws and trains on this machine", True),
    "bundle": Command("limner.cli.bundle", "pack a trained model, with its name and scores, to pass on"),
    "import": Command("limner.cli.imports", "convert published weights to our format"),
    "evaluate": Command("limner.cli.evaluate", "measure a trained model", True),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. `argv` defaults to the process's arguments."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = _take("--debug", arguments)
    warnings.showwarning = _show_warning
    command = COMMANDS.get(arguments[0]) if arguments else None
    try:
        if command is None:
            return _without_command(arguments)
        if command.heavy and argv is None:
            from limner.cli.memory import settle_allocator

            settle_allocator()
        return int(import_module(command.module).main(arguments[1:]) or 0)
    except BrokenPipeError:  # the reader of our output has gone, as in `limner --help | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (Exception, KeyboardInterrupt) as error:
        told = _explain(error, command)
        if told is None:
            raise
        if debug:
            traceback.print_exception(error)
        code, sentence = told
        print(f"limner: {sentence}", file=sys.stderr)
        return code


def help_text() -> str:
    """What `limner --help` prints."""
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
    """`name` if it is one of the options; else a `UserError` that suggests the nearest."""
    if name in options:
        return name
    close = get_close_matches(name, options, 1, 0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(options)}"
    raise UserError(f"there is no {what} {name!r}: {hint}")


def dispatch(prog: str, kinds: Mapping[str, Callable[[Sequence[str]], None]], argv: Sequence[str]) -> None:
    """Run one of a command's own commands; the first line of its docstring is its help."""
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
        from limner import __version__

        print(f"limner {__version__}")
    else:
        kind = "option" if arguments[0].startswith("-") else "command"
        choose(arguments[0], ["--help", "--version"] if kind == "option" else list(COMMANDS), kind)
    return 0


def _take(flag: str, arguments: list[str]) -> bool:
    """Remove `flag` from the arguments (those before `--`); whether it was there."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    found = [i for i in range(end) if arguments[i] == flag]
    for i in reversed(found):
        del arguments[i]
    return bool(found)


def _explain(error: BaseException, command: Command | None) -> tuple[int, str] | None:
    """Exit code and sentence for what a user can mend; None for a fault of the program."""
    if isinstance(error, UserError):
        return 2, str(error)
    if isinstance(error, KeyboardInterrupt):
        resumes = command is not None and command.resumes
        return 130, "interrupted; the same command goes on from here" if resumes else "interrupted"
    loop = sys.modules.get("limner.training.loop")  # imported by whatever trains
    if loop is not None and isinstance(error, loop.Interrupted):
        return 130, str(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return 2, f"{error.filename}: {error.strerror}"
    return None


_shown: Counter[tuple[str, int]] = Counter()  # warnings so far from a place in the source


def _show_warning(
    message: Warning | str, category: object, filename: str, lineno: int, *_: object, **__: object
) -> None:
    """A warning as one line, without the place in the source; the same kind three times at most."""
    _shown[filename, lineno] += 1
    if _shown[filename, lineno] <= 3:
        print(f"limner: warning: {message}", file=sys.stderr)
    elif _shown[filename, lineno] == 4:
        print("limner: warning: and more of this kind", file=sys.stderr)
