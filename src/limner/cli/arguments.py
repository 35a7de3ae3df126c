"""Options from dataclasses, by `tyro`, with its complaints put into one sentence."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from typing import Any, TypeVar

import tyro

from limner.errors import UserError

T = TypeVar("T")


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
            return tyro.cli(cls, args=list(argv), prog=prog, config=markers, **options)
    except SystemExit as leaving:
        if not leaving.code:
            raise
        raise UserError(f"{one_sentence(said.getvalue())} (see `{prog} --help`)") from None
    finally:
        if not said.getvalue().startswith("╭"):
            sys.stderr.write(said.getvalue())


def one_sentence(box: str) -> str:
    """What tyro's framed error message says, without its frame, the help it repeats and where to read on."""
    sections, lines = [], []
    for line in box.splitlines():
        text = re.sub(r"\s+", " ", line.strip("│ "))
        if not line.startswith("│"):
            continue
        if set(text) == {"─"}:
            sections.append(lines)
            lines = []
        else:
            lines.append(text)
    said = []
    for first, *rest in filter(None, [*sections, lines]):
        if first.startswith("Perhaps you meant"):  # then options with their help: the first one will do
            said.append(f"did you mean {' '.join(rest).split()[0].rstrip(',')}?")
        elif first.startswith("Missing from"):
            said.append(f"missing: {', '.join(rest[::2])}" if len(rest) > 2 else f"missing: {rest[0]}")
        elif not first.startswith(("For full helptext", "Argument helptext")):
            said.append(" ".join((first, *rest)))
    sentence = ", ".join(said) or "the arguments cannot be read"
    sentence = sentence.replace("Unrecognized options:", "unknown:").replace("Error parsing", "cannot read")
    return re.sub(r" \(required\)", "", sentence[:1].lower() + sentence[1:])
