"""Settings that are unions of dataclasses, with the member selected by name: `--prior.training.schedule Plateau`.

The selected member determines the other options. So this module removes the selection from the arguments first; tyro
then parses the rest with the selected member as the default.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

import tyro

from limner.config import settingless_variants, union_members, variant_name
from limner.errors import UserError
from limner.validation import invalid_choice

T = TypeVar("T")


def apply_variant_flags(default: T, argv: Sequence[str]) -> tuple[T, list[str]]:
    """Return `default` with the union members that the arguments select, and the remaining arguments.

    A selected member has its own defaults; a setting without a default takes the value of the replaced member. Only
    tyro's instances are validated, because two selections may be valid only together. Raises `UserError` for an unknown
    member.
    """
    rest = list(argv)
    return _apply(type(default), default, "", rest), rest


def variant_flags(default: Any, path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield each option that selects a union member within the dataclass `default`, with the names of the members."""
    hints = get_type_hints(type(default))
    for setting in fields(default):
        hint, value, option = hints[setting.name], getattr(default, setting.name), f"{path}{_option(setting.name)}"
        if names := _variants(hint):
            yield f"--{option}", list(names)
        if is_dataclass(value):
            yield from variant_flags(value, f"{option}.")


def _apply(hint: Any, value: Any, path: str, argv: list[str]) -> Any:
    """Return `value`, of type `hint` at `path`, with the selected members; remove the selections from `argv`."""
    names = _variants(hint)
    name = _pop_option(f"--{path}", argv) if names else None
    if name is not None and name not in names:
        raise UserError(f"--{path} {invalid_choice(name, names)}")
    if name is not None and type(value) is not names[name]:
        value = _unvalidated(names[name], {f.name: _member_default(f, value) for f in fields(names[name])})
    if not is_dataclass(value):
        return value
    hints = get_type_hints(type(value))
    before = {f.name: getattr(value, f.name) for f in fields(value)}
    after = {k: _apply(hints[k], inner, f"{path}.{_option(k)}".lstrip("."), argv) for k, inner in before.items()}
    return value if all(after[key] is inner for key, inner in before.items()) else _unvalidated(type(value), after)


def _variants(hint: Any) -> dict[str, type]:
    """Return the members of a union of dataclasses by name; empty for other types and for unions that tyro parses."""
    members = union_members(hint)
    all_dataclasses = len(members) > 1 and all(map(is_dataclass, members)) and not settingless_variants(hint)
    return {variant_name(member): member for member in members} if all_dataclasses else {}


def _member_default(setting: Any, replaced: Any) -> Any:
    """Return the default of a member's setting; without one, the value of the replaced member."""
    if setting.default is not MISSING:
        return setting.default
    if setting.default_factory is not MISSING:
        return setting.default_factory()
    return getattr(replaced, setting.name, tyro.MISSING)


def _unvalidated(kind: type, values: dict[str, Any]) -> Any:
    """Build an instance without validation."""
    instance = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(instance, name, value)
    return instance


def _pop_option(option: str, argv: list[str]) -> str | None:
    """Remove all occurrences of an option from the arguments. Return the last value; None without any.

    Raises `UserError` if a value is missing.
    """
    value, i = None, 0
    while i < len(argv):
        word, equals, after = argv[i].partition("=")
        if word != option and _option(word) != option:
            i += 1
            continue
        if not equals and (i + 1 == len(argv) or argv[i + 1].startswith("--")):
            raise UserError(f"{option} needs 1 value")
        value = after if equals else argv[i + 1]
        del argv[i : i + (1 if equals else 2)]
    return value


def _option(name: str) -> str:
    return name.replace("_", "-")
