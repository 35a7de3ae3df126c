"""Frozen dataclasses to plain dictionaries and JSON, and back again with every mistake named.

A run is described by nested, frozen, keyword-only dataclasses that live next to what they build.
This module turns them into JSON (saved with the run, carried in each checkpoint) and reads them
back strictly: an unknown key, a missing one or a wrong type is a `UserError` that says where it is
and which key was probably meant. Nothing is guessed and nothing is imported by name, so a config
file from a stranger can at worst be wrong.

Fields may be `bool`, `int`, `float`, `str`, `Literal[...]`, a `tuple` of fixed length, another dataclass,
a union of dataclasses, or one of these or None. In a union ("constant, cosine or plateau") the dictionary
carries the name of the class under `"type"`, which is why variants need no flags. Where none of them has settings
("auto, bf16 or fp32") the name alone, in lower case, says all.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from limner.errors import UserError, suggestion
from limner.json_files import read_json, write_json
from limner.validation import NAMES, OutOfRange, listing, not_among, short

T = TypeVar("T")

TAG = "type"  # key that tells the members of a union of dataclasses apart


def to_dict(config: Any, kind: Any = None) -> dict[str, Any]:
    """The dataclass as nested dictionaries of JSON values; `from_dict` is the inverse.

    `kind` is what it will be read as, its own class by default; a union makes the dictionary carry the class's name.
    """
    return _dump(config, kind or type(config))


def from_dict(cls: type[T], data: Any, where: str = "") -> T:
    """Build `cls` from nested dictionaries; absent keys keep their defaults.

    `where` is the dotted path that error messages start from. Raises `UserError` on an unknown or
    missing key and on a value of the wrong type or out of its range; any `ValueError` of a
    `__post_init__` becomes one too.
    """
    return _load(cls, data, where)


def save_json(config: Any, path: str | Path) -> None:
    """Write the config, atomically, as indented JSON."""
    write_json(path, to_dict(config), indent=2)


def load_json(cls: type[T], path: str | Path) -> T:
    """Read a config written by `save_json` or by hand. Raises `UserError`."""
    data = read_json(path)
    try:
        return from_dict(cls, data)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def differences(a: Mapping[str, Any], b: Mapping[str, Any], where: str = "") -> list[str]:
    """Dotted paths at which two dictionaries differ, in order of appearance."""
    found = []
    for key in dict.fromkeys([*a, *b]):
        path = f"{where}.{key}" if where else key
        left, right = a.get(key, MISSING), b.get(key, MISSING)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            found += differences(left, right, path)
        elif left != right:
            found.append(path)
    return found


def members(hint: Any) -> list[Any]:
    """The members of a union except None; empty for other types."""
    is_union = get_origin(hint) in (Union, UnionType)  # `Optional[X]` has the first as its origin, `X | None` the other
    return [kind for kind in get_args(hint) if kind is not NoneType] if is_union else []


def bare(hint: Any) -> dict[str, type]:
    """The dataclasses of a union by name, in lower case, if none of them has settings; empty for other types."""
    kinds = members(hint)
    alike = len(kinds) > 1 and all(is_dataclass(kind) and not fields(kind) for kind in kinds)
    return {kind.__name__.lower(): kind for kind in kinds} if alike else {}


def variant_name(kind: type) -> str:
    """Name that selects a member of a union in files and on the command line: the class name without `Config`."""
    return kind.__name__.removesuffix("Config")


def _dump(value: Any, hint: Any) -> Any:
    for name, member in bare(hint).items():
        if type(value) is member:
            return name
    if is_dataclass(value):
        hints = get_type_hints(type(value))
        tag = {TAG: variant_name(type(value))} if len(members(hint)) > 1 else {}
        return tag | {f.name: _dump(getattr(value, f.name), hints[f.name]) for f in fields(value)}
    return list(value) if isinstance(value, tuple) else value


def _load(hint: Any, value: Any, where: str) -> Any:
    """`value` as what the annotation `hint` says it is."""
    kinds, args, at = members(hint), get_args(hint), where or "the config"
    if get_origin(hint) is Literal:
        if not any(value == choice and type(value) is type(choice) for choice in args):
            raise UserError(f"{at} {not_among(value, args)}")
        return value
    if kinds:
        if value is None and NoneType in args:
            return None
        if len(kinds) == 1:
            return _load(kinds[0], value, where)
        if names := bare(hint):
            return names[_load(Literal[tuple(names)], value, where)]()
        named = {variant_name(kind): kind for kind in kinds}
        data = _mapping(value, " or ".join(named), at)
        name = data.get(TAG)
        if not isinstance(name, str) or name not in named:
            raise UserError(
                f"{at}.{TAG} {not_among(name, named)}"
                if TAG in data
                else f"{at} needs a {TAG!r}: choose {listing(named)}"
            )
        return _load(named[name], {k: v for k, v in data.items() if k != TAG}, where)
    if is_dataclass(hint):
        return _load_dataclass(hint, value, where)
    if get_origin(hint) is tuple:
        if not isinstance(value, (list, tuple)) or len(value) != len(args):
            raise _wrong_type(f"a list of {len(args)} values", value, at)
        return tuple(_load(kind, v, f"{where}[{i}]") for i, (kind, v) in enumerate(zip(args, value, strict=True)))
    if hint is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise _wrong_type("a finite number", value, at) from None
    if type(value) is not hint:
        raise _wrong_type(NAMES[hint], value, at)
    return value


def _load_dataclass(cls: Any, value: Any, where: str) -> Any:
    at, known = where or "the config", {f.name: f for f in fields(cls)}
    data = _mapping(value, cls.__name__, at)
    for key in data:
        if key not in known:
            raise UserError(f"{at} has no setting {key!r} ({suggestion(key, known)})")
    for name, field in known.items():
        if name not in data and field.default is field.default_factory is MISSING:
            raise UserError(f"{at} lacks {name!r}, which has no default")
    hints = get_type_hints(cls)
    values = {key: _load(hints[key], value, f"{where}.{key}".lstrip(".")) for key, value in data.items()}
    try:
        return cls(**values)
    except OutOfRange as error:
        raise UserError(f"{where}.{error}".lstrip(".")) from None
    except ValueError as error:
        raise UserError(f"{at}: {error}") from None


def _mapping(value: Any, kind: str, at: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong_type(f"the settings of a {kind}", value, at)
    return value


def _wrong_type(expected: str, value: Any, at: str) -> UserError:
    return UserError(f"{at} must be {expected}, not {short(value)}")
