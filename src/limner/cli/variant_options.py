"""Settings that are unions of dataclasses, with the member selected by name: `--prior.training.schedule Plateau`.

The selected member determines the other options. So this module removes the selection from the arguments first; tyro
then parses the rest with the selected member as the default.
"""

from __future__ import annotations

from argparse import ArgumentError, ArgumentParser
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

from limner.cli.arguments import default_of
from limner.config import settingless_variants, union_members, variant_name
from limner.errors import UserError
from limner.validation import invalid_choice

T = TypeVar("T")


def apply_variant_flags(default: T, argv: Sequence[str]) -> tuple[T, list[str], dict[str, list[str]]]:
    """Return `default` with the union members that the arguments select, the remaining arguments, and the names of the
    members by option.

    A selected member has its own defaults; a setting without a default takes the value of the replaced member. Only
    tyro's instances are validated, because two selections may be valid only together. Raises `UserError` for an unknown
    member.
    """
    rest, names_by_option = list(argv), {}

    def apply(hint: Any, value: Any, path: str) -> Any:
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
        hints = get_type_hints(type(value))
        before = {f.name: getattr(value, f.name) for f in fields(value)}
        after = {k: apply(hints[k], v, f"{path}.{k}".lstrip(".").replace("_", "-")) for k, v in before.items()}
        return value if all(after[key] is v for key, v in before.items()) else _unvalidated(type(value), after)

    return apply(type(default), default, ""), rest, names_by_option


def _unvalidated(kind: type, values: dict[str, Any]) -> Any:
    """Build an instance without validation."""
    instance = object.__new__(kind)
    instance.__dict__.update(values)
    return instance


def pop_option(option: str, argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the last value of an option, None without any, and the other arguments.

    Raises `UserError` if a value is missing.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(option, dest="value")
    try:
        known, rest = parser.parse_known_args(argv)
    except ArgumentError:
        raise UserError(f"{option} needs 1 value") from None
    return known.value, rest
