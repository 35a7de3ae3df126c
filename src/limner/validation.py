"""Validation of settings by annotations: a range, `lr: Annotated[float, Range(gt=0)]`, or a `Literal`.

The base class `Validated` checks each new instance, so Python, JSON (`limner.config`) and the command line
(`limner.cli.arguments`) reject the same values with the same message.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import isfinite
from numbers import Integral, Real
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from limner.errors import closest_match

TYPE_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}  # in messages


class InvalidSetting(ValueError):
    """Error for an invalid value. The message is `name` and `problem`, such as "must be above 0, not -1.0". A caller
    that knows the path of the setting puts it before the name."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(name, problem)  # all arguments, since processes pickle the error
        self.name, self.problem = name, problem

    def __str__(self) -> str:
        return f"{self.name} {self.problem}"


@dataclass(frozen=True)
class Range:
    """Valid numbers of a setting: from `ge` to `le`, inclusive; `gt` and `lt` are exclusive bounds. NaN, infinities and
    absolute values above `LARGEST` are invalid."""

    ge: float | None = None
    le: float | None = None
    gt: float | None = None
    lt: float | None = None

    def check(self, name: str, value: object, whole: bool = False) -> None:
        """Raise `InvalidSetting` if the value is out of range or not a number, or with `whole` not an integer."""
        if not isinstance(value, Integral if whole else Real) or isinstance(value, bool):
            raise InvalidSetting(name, f"must be {TYPE_NAMES[int if whole else float]}, not {abbreviate(value)}")
        if not isinstance(value, Integral) and not isfinite(value):
            raise InvalidSetting(name, f"must be a finite number, not {abbreviate(value)}")
        number: Any = value  # comparable, which its abstract type is not
        low, high = -LARGEST if self.ge is None else self.ge, LARGEST if self.le is None else self.le
        for violated, relation, bound in (
            (number < low, "at least", low),
            (self.gt is not None and number <= self.gt, "above", self.gt),
            (number > high, "at most", high),
            (self.lt is not None and number >= self.lt, "below", self.lt),
        ):
            if violated:
                raise InvalidSetting(name, f"must be {relation} {abbreviate(bound)}, not {abbreviate(value)}")


LARGEST = 1e37  # below the maximum of fp32, 3.4e38, with a margin for products and sums
SEEDS = Range(0, 2**63 - 1)  # valid for every random number generator


class Validated:
    """Base of dataclasses that validate each field against the `Range` or `Literal` of its annotation.

    The range of a tuple applies to each element, and the length must match the annotation. The `__post_init__` of a
    subclass calls this one, then checks relations between fields. Raises `InvalidSetting`.
    """

    def __post_init__(self) -> None:
        for name, (allowed, whole, words, count) in rules(type(self)).items():
            value = getattr(self, name)
            if value in words:
                continue
            if allowed is None:
                raise InvalidSetting(name, invalid_choice(value, words))
            numbers = value if isinstance(value, (tuple, list)) else (value,)
            for number in numbers:
                allowed.check(name, number, whole)
            if count and len(numbers) != count:
                raise InvalidSetting(name, f"must be a list of {count} values, not {abbreviate(value)}")


class Rule(NamedTuple):
    """Valid values of a field."""

    allowed: Range | None  # range of numbers; None for a `Literal`
    whole: bool  # integers only
    words: tuple[Any, ...]  # valid values that are not numbers: None, or words of a `Literal`
    count: int  # length of a tuple; 0 for other types and for tuples of any length


@cache
def rules(cls: type) -> dict[str, Rule]:
    """Return the rule of each field with a `Range`, and of each `Literal`."""
    by_field = {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        allowed = next((note for note in getattr(hint, "__metadata__", ()) if isinstance(note, Range)), None)
        if allowed is None and get_origin(hint) is not Literal:
            continue
        types, kind = leaf_types(hint), get_args(hint)[0] if allowed else hint
        words = [word for leaf in types for word in get_args(leaf)] + [None] * (type(None) in types)
        tuples = [get_args(k) for k in (kind, *get_args(kind)) if get_origin(k) is tuple]  # also in a union with None
        count = len(tuples[0]) if tuples and Ellipsis not in tuples[0] else 0
        by_field[name] = Rule(allowed, float not in types, tuple(words), count)
    return by_field


def leaf_types(hint: Any) -> set[Any]:
    """Return the elementary types in an annotation: for `tuple[int, ...] | None`, int, the ellipsis and None."""
    if get_origin(hint) is Annotated:
        return leaf_types(get_args(hint)[0])
    if get_origin(hint) is Literal or not get_args(hint):
        return {hint}
    return set().union(*map(leaf_types, get_args(hint)))


def invalid_choice(value: object, choices: Iterable[object]) -> str:
    """Return the end of the message for an invalid choice: all choices, and the most similar one."""
    choices = list(choices)
    hint = f" (did you mean {match!r}?)" if (match := closest_match(value, choices)) else ""
    return f"cannot be {abbreviate(value)}: choose {', '.join(map(repr, choices))}{hint}"


def abbreviate(value: object) -> str:
    """Return the `repr` of a value, shortened if it is long; integers get thousands separators."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        value = int(value)
        digits = value.bit_length() * 0.30103
        return f"{value:,}" if digits < 25 else f"a number of {int(digits) + 1} digits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
