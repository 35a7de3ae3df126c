"""Command-line options from dataclasses, by `tyro`, with errors of one sentence; checks of output paths."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from argparse import ArgumentError, ArgumentParser
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import docstring_parser
import tyro
from tyro import constructors
from tyro.conf import arg

from limner import compat
from limner.config import settingless_variants, union_members, variant_name
from limner.errors import UserError, closest_match
from limner.validation import InvalidSetting, invalid_choice

T = TypeVar("T")
_TEMPORARY_SUFFIX = "x" * 18  # as long as what temporary names (`limner.atomic_io`) append
# Of fields outside `limner.cli`.
_METAVARS = {"bundle": "NAME|FOLDER", "start": "NAME|FOLDER", "background": "COLOR", "categories": "NAME ..."}
_MAX_MESSAGE = 300  # characters of an error message, which quotes the arguments


class Writable(NamedTuple):
    """Mark of an option that names an output. `parse` checks the path by `check_writable`."""

    kind: Literal["file", "PNG", "folder"]


NewFolder = Annotated[Path, Writable("folder")]
OutputFile = Annotated[Path | None, arg(aliases=("-o",)), Writable("file")]
OutputPNG = Annotated[Path | None, arg(aliases=("-o",)), Writable("PNG")]

_MARKERS = (tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff, tyro.conf.PositionalMetavarFromFieldName)
_REGISTRY = constructors.ConstructorRegistry()


@_REGISTRY.primitive_rule
def _by_name(info: constructors.PrimitiveTypeInfo) -> constructors.PrimitiveConstructorSpec[Any] | None:
    """Parse a union of dataclasses without settings by name: `--prior.training.precision bf16`."""
    if not (names := settingless_variants(info.type)):
        return None
    return constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="{" + ",".join(names) + "}",
        instance_from_str=lambda words: names[words[0]](),
        is_instance=lambda value: type(value) in names.values(),
        str_from_instance=lambda value: [type(value).__name__.lower()],
        choices=tuple(names),
    )


@_REGISTRY.primitive_rule
def _optional(info: constructors.PrimitiveTypeInfo) -> constructors.PrimitiveConstructorSpec[Any] | None:
    """Parse `X | None`, where "None" gives None, and show only X in help: `INT` instead of `{None}|INT`."""
    if NoneType not in get_args(info.type) or tyro.conf.DisallowNone in info.markers:
        return None
    inner = replace(info, markers=info.markers | {tyro.conf.DisallowNone})
    spec: Any = constructors.ConstructorRegistry.get_primitive_spec(inner)
    if not isinstance(spec, constructors.PrimitiveConstructorSpec):  # X is a union of dataclasses with settings
        return None
    parse_words = spec.instance_from_str
    return replace(spec, instance_from_str=lambda words: None if words == ["None"] else parse_words(words))


@_REGISTRY.primitive_rule
def _path(info: constructors.PrimitiveTypeInfo) -> constructors.PrimitiveConstructorSpec[Path] | None:
    """Parse a path, shown as FILE in help."""
    is_path, to_words = (lambda value: isinstance(value, Path)), (lambda value: [str(value)])
    spec = constructors.PrimitiveConstructorSpec(1, "FILE", lambda words: Path(words[0]), is_path, to_words)
    return spec if info.type is Path else None


@_REGISTRY.struct_rule
def _with_help(info: constructors.StructTypeInfo) -> constructors.StructConstructorSpec | None:
    """Parse a dataclass, with unwrapped help texts: tyro keeps the line breaks of docstrings."""
    if not is_dataclass(info.type):
        return None
    hints, specs = get_type_hints(info.type, include_extras=True), []
    for setting in fields(info.type):
        default = getattr(info.default, setting.name) if is_dataclass(info.default) else default_of(setting)
        help_text = partial(help_of, info.type, setting.name, default)
        hint: Any = hints[setting.name]
        if setting.name in _METAVARS and get_origin(hint) is not Annotated:
            hint = Annotated[hint, arg(metavar=_METAVARS[setting.name])]
        if default is None or default == ():
            hint = Annotated[hint, arg(help_behavior_hint=partial(_default_hint, help_text))]
        specs.append(constructors.StructFieldSpec(setting.name, hint, default, help_text))
    return constructors.StructConstructorSpec(instantiate=info.type, fields=tuple(specs))


def default_of(setting: Field[Any], fallback: object = None) -> Any:
    """Return the default of a dataclass's setting; without one, the setting of `fallback`, else `tyro.MISSING`."""
    if setting.default_factory is not MISSING:
        return setting.default_factory()
    return getattr(fallback, setting.name, tyro.MISSING) if setting.default is MISSING else setting.default


def _default_hint(help_text: Callable[[], str | None], default: str) -> str:
    """Return the end of an option's help: its default, unless the text states it."""
    return "" if "by default" in (help_text() or "") else f"(default: {default})"


def help_of(cls: type, name: str, default: object = None) -> str | None:
    """Return the help of a setting from the docstrings of the dataclass or its bases, else of its default's class."""
    for base in cls.__mro__[:-1]:
        for parameter in docstring_parser.parse_from_object(base).params:
            if name in parameter.arg_name.split(", ") and parameter.description:
                return _unwrap(parameter.description)
    return _unwrap(docstring_parser.parse(default.__doc__ or "").description or "") if is_dataclass(default) else None


def _unwrap(text: str) -> str:
    """Join the lines of each paragraph."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text.strip()))


def parse(cls: type[T], argv: Sequence[str], prog: str, default: T | None = None) -> T:
    """Build an instance of the dataclass `cls` from command-line arguments.

    A union of dataclasses has the member of `default`, or the one that an option selects by name:
    `--prior.training.schedule Plateau`. `--help` prints the class's docstring, these options and all others, and exits.
    Raises `UserError` for invalid arguments.
    """
    variants: dict[str, list[str]] = {}
    if default is not None:
        default, argv, variants = _select_variants(cls, default, argv)
    description = [_unwrap(docstring_parser.parse(cls.__doc__ or "").description or "")]
    if variants:
        description += ["", "These options select a variant, whose settings are then options:"]
        description += [f"  {option} {', '.join(names)}" for option, names in variants.items()]
    options: dict[str, Any] = {"description": "\n".join(description), "config": _MARKERS, "registry": _REGISTRY}
    options |= {} if default is None else {"default": default}

    def raise_user_error(event: compat.tyro_errors.ParseErrorEvent) -> None:
        if isinstance(event, compat.tyro_errors.UnrecognizedArgs):
            parser = tyro.extras.get_parser(cls, **options)
            known = [name for action in parser._actions for name in action.option_strings]
            message = _unknown_options(event.tokens, [*variants, *known])
        else:
            message = _invalid_setting(sys.exception(), cls) or _parse_error(event)
        message = message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}..."
        raise UserError(f"{message} (see `{prog} --help`)")

    with compat.tyro_errors.on_parse_error(raise_user_error):
        try:
            parsed: Any = tyro.cli(cls, args=list(argv), prog=prog, **options)
        except ValueError as error:  # raised by a dataclass with unprefixed options
            raise UserError(f"{_invalid_setting(error, cls) or error} (see `{prog} --help`)") from None
    paths = {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        for note in getattr(hint, "__metadata__", ()):
            if isinstance(note, Writable) and (path := getattr(parsed, name)):
                paths[name] = check_writable(path, note.kind)
    return replace(parsed, **paths)


def _select_variants(cls: type[T], default: T, argv: Sequence[str]) -> tuple[T, list[str], dict[str, list[str]]]:
    """Return `default` with the union members that the arguments select, the other arguments, and the names of the
    members by option. tyro cannot do this: the selected members determine which other options exist.

    A selected member has its own defaults; a setting without a default takes the value of the replaced member. Only
    tyro's instances are validated, because two selections may be valid only together. Raises `UserError` for an unknown
    member.
    """
    rest, names_by_option = list(argv), {}

    def select(hint: Any, value: Any, path: str) -> Any:
        """Return `value`, of type `hint` at `path`, with the selected members."""
        members, option = union_members(hint), f"--{path}"
        if len(members) > 1 and all(map(is_dataclass, members)) and not settingless_variants(hint):
            by_name = {variant_name(member): member for member in members}
            names_by_option[option] = list(by_name)
            name, rest[:] = pop_option(option, rest)
            if name is not None and name not in by_name:
                raise UserError(f"{option} {invalid_choice(name, by_name)}")
            if name is not None and type(value) is not by_name[name]:
                value = _unvalidated(by_name[name], {f.name: default_of(f, value) for f in fields(by_name[name])})
        if not is_dataclass(value):
            return value
        hints, after = get_type_hints(type(value), include_extras=True), {}
        for setting in fields(value):
            kind, inner = hints[setting.name], path if _is_unprefixed(hints[setting.name]) else f"{path}.{setting.name}"
            bare = get_args(kind)[0] if get_origin(kind) is Annotated else kind
            after[setting.name] = select(bare, getattr(value, setting.name), inner.lstrip(".").replace("_", "-"))
        changed = any(after[name] is not getattr(value, name) for name in after)
        return _unvalidated(type(value), after) if changed else value

    return select(cls, default, ""), rest, names_by_option


def _is_unprefixed(hint: Any) -> bool:
    """Return True if a nested dataclass omits the prefix of its options."""
    return any(getattr(note, "name", None) == "" for note in getattr(hint, "__metadata__", ()))


def _unvalidated(kind: type, values: dict[str, Any]) -> Any:
    """Build an instance without validation."""
    instance = object.__new__(kind)
    instance.__dict__.update(values)
    return instance


def pop_option(option: str, argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the last value of an option, else None, and the other arguments. Raises `UserError` without a value."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(option, dest="value")
    try:
        known, rest = parser.parse_known_args(argv)
    except ArgumentError:
        raise UserError(f"{option} needs 1 value") from None
    return known.value, rest


def _unknown_options(words: Sequence[str], options: Sequence[str]) -> str:
    names = [word for word in words if word.startswith("--")] or words  # omits values of unknown options
    match = closest_match(names[0], options) if names[0].startswith("--") and names[0] not in options else None
    return f"unknown: {', '.join(names)}" + (f", did you mean {match}?" if match else "")


def _parse_error(event: compat.tyro_errors.ParseErrorEvent) -> str:
    """Return the message for tyro's errors, except unknown options."""
    match event:
        case compat.tyro_errors.MissingArgs():
            return f"missing: {', '.join(_name(missing.arg) for missing in event.missing_arguments)}"
        case compat.tyro_errors.BadValue():
            count = event.argument.lowered.nargs
            return f"{_name(event.argument)} needs {count} value{'' if count == 1 else 's'}"
        case compat.tyro_errors.InvalidChoice():
            return f"{_name(event.argument)} {invalid_choice(event.value, event.choices)}"
        case compat.tyro_errors.InstantiationFailure(message=message, argument=argument):
            reason = message.partition("\n")[0].rstrip(".")
            return f"{_name(argument)} must be {argument.lowered.metavar} ({reason})" if argument else reason
    return "the arguments are invalid"


def _name(argument: Any) -> str:
    """Return the name in messages: "--out" for an option, "CAPTION" for a positional argument."""
    return str(argument.lowered.metavar) if argument.is_positional() else argument.display_name()


def _invalid_setting(error: BaseException | None, cls: type) -> str | None:
    """Return the message of an `InvalidSetting` error with the option's name; None for other errors.

    Among the causes of tyro's error, `InvalidSetting` has the message, another error the option.
    """
    path = ""
    while error is not None and not isinstance(error, InvalidSetting):
        option = getattr(error, "arg", None)
        path, error = option if isinstance(option, str) else path, error.__context__
    if error is None:
        return None
    first, _, rest = path.partition(".")
    if _is_unprefixed(get_type_hints(cls, include_extras=True).get(first)):
        path = rest
    elif path == cls.__name__:  # tyro's name for the root
        path = ""
    return ".".join(filter(None, (path, error.name))).replace("_", "-") + " " + error.problem


def check_writable(path: Path, kind: Literal["file", "PNG", "folder"] = "file") -> Path:
    """Check that a file or folder can be written, before the work starts. Return the path.

    A folder "." or one that ends in ".." becomes absolute. Raises `UserError` if the path is of another kind, too
    long or not writable, or if the name of a picture does not end in .png.
    """
    folder = kind == "folder"
    if "\0" in str(path):
        raise UserError(f"{path} contains a zero byte: choose another name")
    if folder and path.name in ("", ".."):
        path = path.resolve()
    if not folder and (path.name in ("", "..") or os.path.isdir(path)):
        raise UserError(f"{path} is a folder: name a file in it")
    if os.path.exists(path) and not (os.path.isdir(path) if folder else os.path.isfile(path)):
        raise UserError(f"{path} is not a {'folder' if folder else 'regular file'}: choose another output path")
    parent = next(p for p in (*[path] * folder, *path.parents) if os.path.lexists(p))
    names = (*path.parts[len(parent.parts) : -1], path.name + _TEMPORARY_SUFFIX)
    try:
        for new_path in (*(parent / name for name in names), f"{path.absolute()}{_TEMPORARY_SUFFIX}"):
            with suppress(FileNotFoundError):
                os.lstat(new_path)  # fails if a name or the path is too long, or if `parent` is not a folder
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        shown = str(path) if len(str(path)) <= 60 else f"{str(path)[:57]}..."
        raise UserError(f"{shown} cannot be written ({error.strerror}): choose another output path") from None
    if kind == "PNG" and path.suffix.lower() != ".png":
        raise UserError(f"pictures are PNG files: use the name {path.with_suffix('.png')}, not {path}")
    return path
