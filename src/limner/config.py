"""Frozen dataclasses to plain dictionaries and JSON, and back again with every mistake named.

A run is described by nested, frozen, keyword-only dataclasses that live next to what they build.
This module turns them into JSON (saved with the run, carried in each checkpoint) and reads them
back strictly: an unknown key, a missing one or a wrong type is a `UserError` that says where it is
and which key was probably meant. Nothing is guessed and nothing is imported by name, so a config
file from a stranger can at worst be wrong.

Fields may be `bool`, `int`, `float`, `str`, `Path`, enums, `Literal[...]`, `X | None`, `tuple`,
`list`, `dict[str, X]`, another dataclass, or a union of dataclasses. In such a union ("constant,
cosine or plateau") the dictionary carries the name of the class under `"type"`, which is why
variants need no flags.

A field's range is declared in its annotation, `lr: Annotated[float, Range(above=0)]`, and checked wherever
an instance is made, by the base class `Checked`.
"""

import dataclasses
import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cache
from math import isfinite
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from limner.errors import UserError
from limner.files import atomic_write_text, require_file

T = TypeVar("T")

TAG = "type"  # key that tells the members of a union of dataclasses apart
UNIONS = (Union, types.UnionType)  # `Optional[X]` has the first as its origin, `X | None` the other
MAX_BYTES = 4 << 20  # a config beyond this is not a config


class OutOfRange(ValueError):
    """The setting `name` `says` something: "must be above 0, not -1.0". Who knows where the setting is puts its path
    before the name."""

    def __init__(self, name: str, says: str) -> None:
        super().__init__(f"{name} {says}")
        self.name, self.says = name, says


@dataclass(frozen=True)
class Range:
    """Numbers that a setting may have: from `least` to `most`, or `above` and `below` where the end itself is none.
    Never nan, never infinite."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def check(self, name: str, value: object, whole: bool = False) -> None:
        """Raises `OutOfRange` for a number outside, for what is no number, and, if `whole`, for fractions."""
        if not isinstance(value, Integral if whole else Real) or isinstance(value, bool):
            raise OutOfRange(name, f"must be {_describe(int if whole else float)}, not {_short(value)}")
        if not isinstance(value, Integral) and not isfinite(value):
            raise OutOfRange(name, f"must be a finite number, not {_short(value)}")
        for says, end, wrong in (
            ("at least", self.least, lambda end: value < end),
            ("above", self.above, lambda end: value <= end),
            ("at most", self.most, lambda end: value > end),
            ("below", self.below, lambda end: value >= end),
        ):
            if end is not None and wrong(end):
                raise OutOfRange(name, f"must be {says} {_short(end)}, not {_short(value)}")


SEEDS = Range(0, 2**63 - 1)  # what every generator of random numbers takes


class Checked:
    """Base of dataclasses whose fields are held to the `Range` in their annotation; that of a tuple is of each of its
    numbers. A `__post_init__` of their own calls this one, then looks at how fields relate."""

    def __post_init__(self) -> None:
        for name, (allowed, whole, optional) in ranges(type(self)).items():
            value = getattr(self, name)
            if value is None and optional:
                continue
            for number in value if isinstance(value, (tuple, list)) else (value,):
                allowed.check(name, number, whole)


@cache
def ranges(cls: type) -> dict[str, tuple[Range, bool, bool]]:
    """Of each field with a range: the range, whether it holds whole numbers, and whether it may be None."""
    found = {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        for note in getattr(hint, "__metadata__", ()):
            if isinstance(note, Range):
                kinds = leaves(hint)
                found[name] = note, float not in kinds, type(None) in kinds
    return found


def leaves(hint: Any) -> set[Any]:
    """The types that an annotation is made of: int and None of `tuple[int, ...] | None`."""
    if get_origin(hint) is Annotated:
        return leaves(get_args(hint)[0])
    if get_origin(hint) is Literal or not get_args(hint):
        return {hint}
    return set().union(*map(leaves, get_args(hint)))


def to_dict(config: Any) -> dict[str, Any]:
    """The dataclass as nested dictionaries of JSON values; `from_dict` is the inverse."""
    return _dump(config, type(config))


def from_dict(cls: type[T], data: Mapping[str, Any], where: str = "") -> T:
    """Build `cls` from nested dictionaries; absent keys keep their defaults.

    `where` is the dotted path that error messages start from. Raises `UserError` on an unknown or
    missing key and on a value of the wrong type or out of its range; any `ValueError` of a
    `__post_init__` becomes one too.
    """
    return _load(cls, data, where)


def save_json(config: Any, path: str | Path) -> None:
    """Write the config, atomically, as indented JSON."""
    atomic_write_text(Path(path), json.dumps(to_dict(config), indent=2) + "\n")


def load_json(cls: type[T], path: str | Path) -> T:
    """Read a config written by `save_json` or by hand. Raises `UserError`."""
    data = read_json(path)
    try:
        return from_dict(cls, data)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def read_json(path: str | Path, max_bytes: int = MAX_BYTES) -> Any:
    """Parse a JSON file that may come from anywhere: absent, oversized and malformed files are
    `UserError`s."""
    path = Path(path)
    require_file(path)
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
        if len(raw) > max_bytes:
            raise UserError(f"{path} is larger than {max_bytes >> 20} MiB, so it is not such a file")
        return json.loads(raw)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None


def override(config: T, changes: Mapping[str, Any]) -> T:
    """A copy with some settings replaced, named by dotted path: `override(run, {"optim.lr":
    3e-4})`."""
    data = to_dict(config)
    for path, value in changes.items():
        *parents, name = path.split(".")
        inner: Any = data
        for depth, parent in enumerate(parents):
            if not isinstance(inner, dict) or not isinstance(inner.get(parent), dict):
                options = inner if isinstance(inner, dict) else ()
                raise UserError(_unknown(parent, options, ".".join(parents[:depth])))
            inner = inner[parent]
        inner[name] = value
    return from_dict(type(config), data)


def differences(a: Mapping[str, Any], b: Mapping[str, Any], where: str = "") -> list[str]:
    """Dotted paths at which two dictionaries differ, in order of appearance."""
    found = []
    for key in dict.fromkeys([*a, *b]):
        path = f"{where}.{key}" if where else key
        left, right = a.get(key, dataclasses.MISSING), b.get(key, dataclasses.MISSING)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            found += differences(left, right, path)
        elif left != right:
            found.append(path)
    return found


def _dump(value: Any, hint: Any) -> Any:
    if dataclasses.is_dataclass(value):
        hints = get_type_hints(type(value))
        tagged = len(_dataclasses_of(hint)) > 1
        fields = {f.name: _dump(getattr(value, f.name), hints[f.name]) for f in dataclasses.fields(value) if f.init}
        return {TAG: type(value).__name__, **fields} if tagged else fields
    members = [m for m in get_args(hint) if m is not type(None)]
    if get_origin(hint) in UNIONS and len(members) == 1:  # X | None
        return _dump(value, members[0])
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        item = (*get_args(hint), Any, Any)[1]
        return {key: _dump(v, item) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_dump(v, item) for v, item in zip(value, _item_hints(hint, len(value)), strict=True)]
    return value


def _load(hint: Any, value: Any, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in UNIONS:
        return _load_union(hint, value, where)
    if origin is Literal:
        if not any(value == choice and type(value) is type(choice) for choice in args):
            raise UserError(f"{_at(where)} cannot be {value!r}: choose {_listing(args)}{_nearest(value, args)}")
        return value
    if dataclasses.is_dataclass(hint):
        return _load_dataclass(hint, value, where)
    if origin in (tuple, list) or hint in (tuple, list):
        kind = origin or hint
        if not isinstance(value, (list, tuple)):
            raise _wrong_type("a list", value, where)
        fixed = kind is tuple and args and args[-1] is not Ellipsis
        if fixed and len(value) != len(args):
            raise _wrong_type(f"a list of {len(args)} values", value, where)
        hints = _item_hints(hint, len(value))
        return kind(_load(h, v, f"{where}[{i}]") for i, (h, v) in enumerate(zip(hints, value, strict=True)))
    if origin in (dict, Mapping) or hint is dict:
        if not isinstance(value, Mapping):
            raise _wrong_type("a mapping", value, where)
        item = (*args, Any, Any)[1]
        return {str(key): _load(item, v, f"{where}.{key}".lstrip(".")) for key, v in value.items()}
    if isinstance(hint, type) and issubclass(hint, Enum):
        choices = [member.value for member in hint]
        return hint(_load(Literal[tuple(choices)], value, where))
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise _wrong_type("a finite number", value, where) from None
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise _wrong_type(_describe(hint), value, where)
    return value


def _load_union(hint: Any, value: Any, where: str) -> Any:
    members = [m for m in get_args(hint) if m is not type(None)]
    if value is None and len(members) < len(get_args(hint)):
        return None
    variants = {m.__name__: m for m in _dataclasses_of(hint)}
    if len(variants) > 1 and isinstance(value, Mapping):
        name = str(value.get(TAG))
        if name not in variants:
            choices = _listing(variants) + _nearest(name, variants)
            raise UserError(f"{_at(where)} needs a {TAG!r}: choose {choices}")
        return _load_dataclass(variants[name], {k: v for k, v in value.items() if k != TAG}, where)
    if len(members) == 1:
        return _load(members[0], value, where)
    for member in members:
        try:
            return _load(member, value, where)
        except UserError:
            pass
    raise _wrong_type(" or ".join(map(_describe, members)), value, where)


def _load_dataclass(cls: Any, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise _wrong_type(f"the settings of a {cls.__name__}", data, where)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    for key in data:
        if key not in fields:
            raise UserError(_unknown(key, fields, where))
    for name, field in fields.items():
        if name not in data and field.default is field.default_factory is dataclasses.MISSING:
            raise UserError(f"{_at(where)} lacks {name!r}, which has no default")
    hints = get_type_hints(cls)
    values = {key: _load(hints[key], value, f"{where}.{key}".lstrip(".")) for key, value in data.items()}
    try:
        return cls(**values)
    except OutOfRange as error:
        raise UserError(f"{where}.{error}".lstrip(".")) from None
    except ValueError as error:
        raise UserError(f"{_at(where)}: {error}") from None


def _dataclasses_of(hint: Any) -> list[Any]:
    return [m for m in get_args(hint) if dataclasses.is_dataclass(m)]


def _item_hints(hint: Any, n: int) -> Sequence[Any]:
    args = get_args(hint)
    if not args:
        return [Any] * n
    return args if get_origin(hint) is tuple and args[-1] is not Ellipsis else [args[0]] * n


def _at(where: str) -> str:
    return where or "the config"


def _unknown(key: object, known: Any, where: str) -> str:
    hint = _nearest(key, known) or f"; it has {_listing(known)}" if known else ""
    return f"{_at(where)} has no setting {key!r}{hint}"


def _nearest(value: object, options: Any) -> str:
    close = get_close_matches(str(value), [str(o) for o in options], n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _listing(options: Any) -> str:
    return ", ".join(repr(option) for option in options)


def _describe(hint: Any) -> str:
    names = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a text",
        Path: "a path",
    }
    return names.get(hint) or getattr(hint, "__name__", str(hint))


def _wrong_type(expected: str, value: Any, where: str) -> UserError:
    return UserError(f"{_at(where)} must be {expected}, not {_short(value)}")


def _short(value: object) -> str:
    """As Python writes it, cut where nobody would read on."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        value = int(value)
        digits = value.bit_length() * 0.30103
        return f"{value:,}" if digits < 25 else f"a number of {int(digits) + 1} digits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
