"""Settings of several kinds, chosen by name: `--prior.training.schedule Plateau`.

Where a setting is a union of dataclasses, the member that is chosen decides which options there are. So the choice is
taken out of the arguments before tyro reads the rest, with the chosen member as the default.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

import tyro

from limner.config import bare, members, variant_name
from limner.errors import UserError
from limner.validation import not_among

T = TypeVar("T")


def chosen(default: T, argv: Sequence[str]) -> tuple[T, list[str]]:
    """The dataclass `default` with the members that the arguments name, and the other arguments.

    A member that is chosen has its own defaults; what has none it takes from the member that it replaces. Such defaults
    are not checked, because two choices may be valid only together: tyro makes them anew, and they are checked then.
    Raises `UserError` for a name that is none.
    """
    rest = list(argv)
    return _chosen(type(default), default, "", rest), rest


def kinds(default: Any, path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Each option that chooses a member of a union within the dataclass `default`, and the names of the members."""
    hints = get_type_hints(type(default))
    for setting in fields(default):
        hint, value, option = hints[setting.name], getattr(default, setting.name), f"{path}{_option(setting.name)}"
        if names := _names(hint):
            yield f"--{option}", list(names)
        if is_dataclass(value):
            yield from kinds(value, f"{option}.")


def _chosen(hint: Any, value: Any, path: str, argv: list[str]) -> Any:
    """`value`, a setting of type `hint` at `path`, with the members that are named; their names leave `argv`."""
    names = _names(hint)
    name = _take(f"--{path}", argv) if names else None
    if name is not None and name not in names:
        raise UserError(f"--{path} {not_among(name, names)}")
    if name is not None and type(value) is not names[name]:
        value = _make(names[name], {f.name: _own(f, value) for f in fields(names[name])})
    if not is_dataclass(value):
        return value
    hints = get_type_hints(type(value))
    before = {f.name: getattr(value, f.name) for f in fields(value)}
    after = {
        key: _chosen(hints[key], inner, f"{path}.{_option(key)}".lstrip("."), argv) for key, inner in before.items()
    }
    return value if all(after[key] is inner for key, inner in before.items()) else _make(type(value), after)


def _names(hint: Any) -> dict[str, type]:
    """The members of a union of dataclasses by name; empty for other types, and where an option names them already."""
    found = members(hint)
    of_classes = len(found) > 1 and all(map(is_dataclass, found)) and not bare(hint)
    return {variant_name(member): member for member in found} if of_classes else {}


def _own(setting: Any, replaced: Any) -> Any:
    """The default of a member's setting, or what the member that it replaces has there."""
    if setting.default is not MISSING:
        return setting.default
    if setting.default_factory is not MISSING:
        return setting.default_factory()
    return getattr(replaced, setting.name, tyro.MISSING)


def _make(kind: type, values: dict[str, Any]) -> Any:
    """An instance that is not checked."""
    made = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def _take(option: str, argv: list[str]) -> str | None:
    """Remove an option from the arguments, as often as it is there; its last value, None if it is not there."""
    value, at = None, 0
    while at < len(argv):
        word, given, after = argv[at].partition("=")
        if word != option and _option(word) != option:
            at += 1
            continue
        if not given and (at + 1 == len(argv) or argv[at + 1].startswith("--")):
            raise UserError(f"{option} needs 1 value")
        value = after if given else argv[at + 1]
        del argv[at : at + (1 if given else 2)]
    return value


def _option(name: str) -> str:
    return name.replace("_", "-")
