"""Conversion of frozen dataclasses to dictionaries and JSON, and strict conversion back.

Nested, frozen, keyword-only dataclasses describe a run; each is defined next to the class that it configures. Their
JSON is saved with the run and in each checkpoint. Reading is strict: an unknown key, a missing key or a wrong type
raises `UserError` with its path and the nearest valid key. Reading never imports a class by name, so an untrusted
config file cannot execute code.

Fields may be `bool`, `int`, `float`, `str`, `Literal[...]`, a `tuple` of fixed length or of any, another dataclass,
a union of dataclasses, or a union of one of these with None. For a union (such as constant, cosine or plateau) the
dictionary has the class name under `"type"`, so variants do not need flags. If no member has settings (such as auto,
bf16 or fp32), the value is the name in lower case.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from limner.errors import UserError, did_you_mean
from limner.json_files import read_json, write_json
from limner.validation import TYPE_NAMES, InvalidSetting, abbreviate, invalid_choice

T = TypeVar("T")

TAG = "type"  # key of the class name in a union of dataclasses


def to_dict(value: Any, hint: Any = None) -> Any:
    """Convert a dataclass, or the value of a field, to JSON values; `from_dict` is the inverse.

    `hint` is the type that `from_dict` will get, by default the class of a dataclass; for a union the dictionary
    includes the class name.
    """
    for name, member in settingless_variants(hint).items():
        if type(value) is member:
            return name
    if is_dataclass(value):
        hints = get_type_hints(type(value))
        tag = {TAG: variant_name(type(value))} if len(union_members(hint)) > 1 else {}
        return tag | {f.name: to_dict(getattr(value, f.name), hints[f.name]) for f in fields(value)}
    return list(value) if isinstance(value, tuple) else value


def save_json(config: Any, path: str | Path) -> None:
    """Write the config atomically as indented JSON."""
    write_json(path, to_dict(config), indent=2)


def load_json(cls: type[T], path: str | Path) -> T:
    """Read a config of `save_json` or a handwritten one. Raises `UserError` if it is invalid."""
    data = read_json(path)
    try:
        return from_dict(cls, data)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Return the dotted paths at which two dictionaries differ, in order of appearance."""
    differing = []
    for key in dict.fromkeys([*a, *b]):
        left, right = a.get(key, MISSING), b.get(key, MISSING)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            differing += [f"{key}.{path}" for path in differences(left, right)]
        elif left != right:
            differing.append(key)
    return differing


def union_members(hint: Any) -> list[Any]:
    """Return the members of a union except None; empty for other types."""
    is_union = get_origin(hint) in (Union, UnionType)  # origins of `Optional[X]` and `X | None`
    return [kind for kind in get_args(hint) if kind is not NoneType] if is_union else []


def settingless_variants(hint: Any) -> dict[str, type]:
    """Return the dataclasses of a union by lower-case name if none has settings; empty for other types."""
    members = union_members(hint)
    settingless = len(members) > 1 and all(is_dataclass(member) and not fields(member) for member in members)
    return {member.__name__.lower(): member for member in members} if settingless else {}


def variant_name(kind: type) -> str:
    """Return the name that selects a union member in files and on the command line: the class name without `Config`."""
    return kind.__name__.removesuffix("Config")


def from_dict(hint: Any, value: Any, where: str = "") -> Any:
    """Build the dataclass `hint`, or the value of a field of this type; absent keys keep their defaults.

    `where` is the dotted path at which error messages start. Raises `UserError` for an unknown or missing key, for a
    value of the wrong type or out of range, and for a `ValueError` of a `__post_init__`.
    """
    members, args, at = union_members(hint), get_args(hint), where or "the config"
    if value is None and NoneType in args:
        return None
    if names := settingless_variants(hint):
        return names[from_dict(Literal[tuple(names)], value, where)]()
    if len(members) == 1:
        return from_dict(members[0], value, where)
    if members or is_dataclass(hint):
        return _load_dataclass({variant_name(member): member for member in members or [hint]}, value, where)
    if get_origin(hint) is Literal:
        if not any(value == choice and type(value) is type(choice) for choice in args):
            raise UserError(f"{at} {invalid_choice(value, args)}")
        return value
    if get_origin(hint) is tuple:
        if args[1:] == (...,) and isinstance(value, (list, tuple)):
            args = args[:1] * len(value)
        if not isinstance(value, (list, tuple)) or len(value) != len(args):
            raise _wrong_type("a list" if ... in args else f"a list of {len(args)} values", value, at)
        return tuple(
            from_dict(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(args, value, strict=True))
        )
    if hint is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise _wrong_type("a finite number", value, at) from None
    if type(value) is not hint:
        raise _wrong_type(TYPE_NAMES[hint], value, at)
    return value


def _load_dataclass(members: Mapping[str, type], value: Any, where: str) -> Any:
    """Build a dataclass, one of `members` by name."""
    at, choices = where or "the config", ", ".join(map(repr, members))
    if not isinstance(value, Mapping):
        raise _wrong_type(f"the settings of a {' or '.join(members)}", value, at)
    data, (name, *others) = dict(value), members
    if others:
        if TAG not in data:
            raise UserError(f"{at} needs a {TAG!r}: choose {choices}")
        name = data.pop(TAG)
        if not isinstance(name, str) or name not in members:
            raise UserError(f"{at}.{TAG} {invalid_choice(name, members)}")
    cls: Any = members[name]
    hints, known = get_type_hints(cls), {f.name: f for f in fields(cls)}
    for key in data:
        if key not in known:
            raise UserError(f"{at}: unknown setting {key!r} ({did_you_mean(key, known)})")
    for key, field in known.items():
        if key not in data and field.default is field.default_factory is MISSING:
            raise UserError(f"{at} lacks {key!r}: add it, since it is required")
    values = {key: from_dict(hints[key], inner, f"{where}.{key}".lstrip(".")) for key, inner in data.items()}
    try:
        return cls(**values)
    except InvalidSetting as error:
        raise UserError(f"{where}.{error}".lstrip(".")) from None
    except ValueError as error:
        raise UserError(f"{at}: {error}") from None


def _wrong_type(expected: str, value: Any, at: str) -> UserError:
    return UserError(f"{at} must be {expected}, not {abbreviate(value)}")
