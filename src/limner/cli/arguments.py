"""Options from dataclasses, by `tyro`, with its complaints put into one sentence; places that options name to write
to."""

from __future__ import annotations

import io
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import tyro

from limner.errors import UserError, printable
from limner.ranges import OutOfRange

T = TypeVar("T")
_TEMPORARY = 18  # bytes by which temporary names (`limner.files`) are longer than what they become
_LONGEST = 300  # characters of a complaint, which repeats what was given


def parse(cls: type[T], argv: Sequence[str], prog: str, default: T | None = None) -> T:
    """An instance of the dataclass `cls` from command-line arguments.

    Unions of dataclasses keep the member that `default` has. Raises `UserError` on a mistake;
    `--help` prints and exits.
    """
    said = io.StringIO()
    markers = (tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff, tyro.conf.PositionalMetavarFromFieldName)
    options: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with redirect_stderr(said):
            found = tyro.cli(cls, args=list(argv), prog=prog, config=markers, **options)
    except SystemExit as leaving:
        if leaving.code:
            sentence = _out_of_range(leaving, cls) or one_sentence(said.getvalue())
            raise UserError(f"{sentence} (see `{prog} --help`)") from None
        raise
    except ValueError as wrong:  # of settings whose options have no prefix
        raise UserError(f"{_out_of_range(wrong, cls) or wrong} (see `{prog} --help`)") from None
    for line in said.getvalue().splitlines():
        print(printable(line), file=sys.stderr)
    return found


def _out_of_range(error: BaseException | None, cls: type) -> str | None:
    """What a dataclass said of its fields when tyro made it, with the option's name: the errors that led to the exit
    are the dataclass's, and tyro's, which knows where the dataclass belongs."""
    place = ""
    while error is not None and not isinstance(error, OutOfRange):
        found = getattr(error, "arg", None)
        place, error = found if isinstance(found, str) else place, error.__context__
    if error is None:
        return None
    first, _, rest = place.partition(".")
    notes = getattr(get_type_hints(cls, include_extras=True).get(first), "__metadata__", ())
    if any(getattr(note, "name", None) == "" for note in notes):  # its options have no prefix
        place = rest
    elif place == cls.__name__:  # tyro's name for the whole
        place = ""
    return ".".join(filter(None, (place, error.name))).replace("_", "-") + " " + error.says


def place(path: Path, folder: bool = False) -> Path:
    """Where a file, or a folder, is to be written, found to be possible before work is done for it.

    A folder's name is made explicit where it is "." or ends in "..". Raises `UserError`: something else is there, a
    name is too long, or nothing can be written there.
    """
    if "\0" in str(path):
        raise UserError(f"{path} cannot be a name: it has a zero byte")
    if folder and path.name in ("", ".."):
        path = path.resolve()
    if not folder and (path.name in ("", "..") or os.path.isdir(path)):
        raise UserError(f"{path} is a folder: name a file in it")
    if os.path.exists(path) and not (os.path.isdir(path) if folder else os.path.isfile(path)):
        raise UserError(f"{path} is {'not a folder' if folder else 'no regular file'}: name another place to write to")
    missing = [p for p in (path, *path.parents) if not os.path.lexists(p)]
    there = (missing[-1] if missing else path).parent if missing or not folder else path
    if not os.path.isdir(there):
        raise UserError(f"{there} is not a folder: name another place to write to")
    names, whole = (os.pathconf(there, f"PC_{kind}_MAX") for kind in ("NAME", "PATH"))
    for part in {path, *missing}:
        if len(os.fsencode(part.name)) > names - (_TEMPORARY if part == path else 0):
            raise UserError(f"the name {part.name[:40]}... is too long for this file system: choose a shorter one")
    if len(os.fsencode(path.absolute())) >= whole - _TEMPORARY:
        raise UserError(f"the path {str(path)[:40]}... is too long for this system: choose a shorter one")
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise UserError(f"{path} cannot be written, {there}: {error.strerror}") from None
    return path


def one_sentence(complaint: str) -> str:
    """What tyro's error message says, without its frame, headline, the help it repeats and where to read on.

    The message is sections between rules. Where stdout is UTF-8 a frame with the headline is around them,
    elsewhere the headline is a first section.
    """
    sections: list[list[str]] = [[]]
    for line in complaint.splitlines():
        text = re.sub(r"\s+", " ", line.strip("│ "))
        if text and set(text) <= {"─", "-"}:
            sections.append([])
        elif text and text[0] not in "╭╰":
            sections[-1].append(text)
    if "╭" not in complaint:
        del sections[0]
    said = []
    for first, *rest in filter(None, sections):
        if first.startswith("Perhaps you meant"):  # options with their help follow, not the nearest first
            options = re.findall(r"(?<![\w-])--?[a-z][\w.-]*", " ".join(rest))
            wrong = re.findall(r"--?[a-z][\w.-]*", " ".join(sections[0]))
            nearest = get_close_matches(wrong[0], options, 1, 0.0) if wrong else options
            said.append(f"did you mean {nearest[0]}?")
        elif first.startswith("Missing from"):
            said.append(f"missing: {', '.join(rest[::2])}" if len(rest) > 2 else f"missing: {rest[0]}")
        elif not first.startswith(("For full helptext", "Argument helptext")):
            said.append(" ".join((first, *rest)))
    sentence = ", ".join(said) or "the arguments cannot be read"
    sentence = sentence.replace("Unrecognized options:", "unknown:").replace("Error parsing", "cannot read")
    sentence = re.sub(r"no type matching (\S+) could be instantiated from \[(.*?)\]\. .*", r"\2 is not \1", sentence)
    sentence = re.sub(r" \(required\)", "", sentence[:1].lower() + sentence[1:])
    return sentence if len(sentence) <= _LONGEST else f"{sentence[:_LONGEST]}..."
