"""Command-line options from dataclasses, by `tyro`, with errors of one sentence; checks of output paths."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import docstring_parser
import tyro
from tyro import _errors  # private, hence the upper bound on tyro's version in pyproject.toml
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)  # fmt: skip

from limner.config import bare
from limner.errors import UserError, nearest
from limner.validation import OutOfRange, not_among

T = TypeVar("T")
_TEMPORARY = 18  # bytes by which temporary names (`limner.atomic_io`) are longer than final names
_LONGEST = 300  # characters of an error message, which quotes the arguments


_REGISTRY = ConstructorRegistry()


@_REGISTRY.primitive_rule
def _by_name(of: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Parse a union of dataclasses without settings by name (`config.bare`): `--prior.training.precision bf16`."""
    if not (names := bare(of.type)):
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="{" + ",".join(names) + "}",
        instance_from_str=lambda given: names[given[0]](),
        is_instance=lambda value: type(value) in names.values(),
        str_from_instance=lambda value: [type(value).__name__.lower()],
        choices=tuple(names),
    )


@_REGISTRY.struct_rule
def _with_help(of: StructTypeInfo) -> StructConstructorSpec | None:
    """Parse a dataclass, with unwrapped help texts: tyro keeps the line breaks of docstrings."""
    if not is_dataclass(of.type):
        return None
    hints, whole = get_type_hints(of.type, include_extras=True), of.default
    given = is_dataclass(whole)
    found = []
    for setting in fields(of.type):
        default = getattr(whole, setting.name) if given else _default(setting)
        nested = type(default) if is_dataclass(default) else None
        says = partial(help_of, of.type, setting.name, nested)
        found.append(StructFieldSpec(setting.name, hints[setting.name], default, says))
    return StructConstructorSpec(instantiate=of.type, fields=tuple(found))


def _default(setting: Field[Any]) -> Any:
    if setting.default is not MISSING:
        return setting.default
    return tyro.MISSING if setting.default_factory is MISSING else setting.default_factory()


def help_of(cls: type, name: str, nested: type | None = None) -> str | None:
    """Return the help of a setting from the docstrings of the dataclass or its bases, else of its value's class."""
    for place in cls.__mro__[:-1]:
        for found in docstring_parser.parse_from_object(place).params:
            if name in found.arg_name.split(", ") and found.description:
                return _flowing(found.description)
    return _flowing(docstring_parser.parse(nested.__doc__ or "").description or "") if nested else None


def _flowing(text: str) -> str:
    """Join the lines of each paragraph."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text.strip()))


def parse(
    cls: type[T], argv: Sequence[str], prog: str, default: T | None = None, kinds: Mapping[str, Sequence[str]] = {}
) -> T:
    """Build an instance of the dataclass `cls` from command-line arguments.

    A union of dataclasses keeps the member of `default`, which `limner.cli.variant_options` selects by name. If no
    member has settings, this function selects the member by name. `kinds` maps options that the caller has already
    parsed to their choices. `--help` prints the class's docstring, `kinds` and the options, and exits. Raises
    `UserError` for invalid arguments.
    """
    about = docstring_parser.parse(cls.__doc__ or "").description or ""
    markers = (tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff, tyro.conf.PositionalMetavarFromFieldName)
    options: dict[str, Any] = {"config": markers, "registry": _REGISTRY} | (
        {} if default is None else {"default": default}
    )
    said = [_flowing(about)]
    if kinds:
        said += ["", "These take another kind, whose settings are then the options:"]
        said += [f"  {option} {', '.join(names)}" for option, names in kinds.items()]
    options["description"] = "\n".join(said)

    def refuse(event: _errors.ParseErrorEvent) -> None:
        if isinstance(event, _errors.UnrecognizedArgs):
            parser = tyro.extras.get_parser(cls, **options)
            known = [name for action in parser._actions for name in action.option_strings]
            says = _unknown(event.tokens, [*kinds, *known])
        else:
            says = _out_of_range(sys.exception(), cls) or _says(event)
        raise UserError(f"{says if len(says) <= _LONGEST else says[:_LONGEST] + '...'} (see `{prog} --help`)")

    with _errors.on_parse_error(refuse):
        try:
            return tyro.cli(cls, args=list(argv), prog=prog, **options)
        except ValueError as wrong:  # raised by a dataclass with unprefixed options
            raise UserError(f"{_out_of_range(wrong, cls) or wrong} (see `{prog} --help`)") from None


def _unknown(words: Sequence[str], options: Sequence[str]) -> str:
    named = [word for word in words if word.startswith("--")] or words  # omits values of unknown options
    meant = nearest(named[0], options) if named[0].startswith("--") and named[0] not in options else None
    return f"unknown: {', '.join(named)}" + (f", did you mean {meant}?" if meant else "")


def _says(event: _errors.ParseErrorEvent) -> str:
    """Return the message for tyro's errors, except unknown options."""
    match event:
        case _errors.MissingArgs():
            return f"missing: {', '.join(_name(missing.arg) for missing in event.missing_arguments)}"
        case _errors.BadValue():
            count = event.argument.lowered.nargs
            return f"{_name(event.argument)} needs {count} value{'' if count == 1 else 's'}"
        case _errors.InvalidChoice():
            return f"{_name(event.argument)} {not_among(event.value, event.choices)}"
        case _errors.InstantiationFailure(message=message, argument=argument):
            reason = message.partition("\n")[0].rstrip(".")
            return f"{_name(argument)} must be {argument.lowered.metavar} ({reason})" if argument else reason
    return "the arguments cannot be read"


def _name(argument: Any) -> str:
    """Return the name in messages: "--out" for an option, "CAPTION" for a positional argument."""
    return str(argument.lowered.metavar) if argument.is_positional() else argument.display_name()


def _out_of_range(error: BaseException | None, cls: type) -> str | None:
    """Return the message of an `OutOfRange` error with the option's name; None for other errors.

    Among the causes of tyro's error, `OutOfRange` has the message, another error the option.
    """
    place = ""
    while error is not None and not isinstance(error, OutOfRange):
        found = getattr(error, "arg", None)
        place, error = found if isinstance(found, str) else place, error.__context__
    if error is None:
        return None
    first, _, rest = place.partition(".")
    notes = getattr(get_type_hints(cls, include_extras=True).get(first), "__metadata__", ())
    if any(getattr(note, "name", None) == "" for note in notes):  # options without a prefix
        place = rest
    elif place == cls.__name__:  # tyro's name for the root
        place = ""
    return ".".join(filter(None, (place, error.name))).replace("_", "-") + " " + error.says


def place(path: Path, folder: bool = False) -> Path:
    """Check that a file or folder can be written, before the work starts. Return the path.

    A folder "." or one that ends in ".." becomes absolute. Raises `UserError` if the path is of another kind, too
    long or not writable.
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


def place_png(path: Path) -> Path:
    """Check an output path like `place`. Raises `UserError` also if the name does not end in .png."""
    if place(path).suffix.lower() != ".png":
        raise UserError(f"pictures are PNG files: name it {path.with_suffix('.png')}, not {path}")
    return path
