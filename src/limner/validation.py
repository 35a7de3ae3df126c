"""Validation of settings by annotations: a range, `lr: Annotated[float, Range(above=0)]`, or a `Literal`.

The base class `Checked` validates each new instance, so Python, JSON (`limner.config`) and the command line
(`limner.cli.arguments`) reject the same values with the same message.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import isfinite
from numbers import Integral, Real
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from limner.errors import nearest

NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}  # names of types in messages


class OutOfRange(ValueError):
    """Error for a setting out of its range. `says` follows `name` in the message: "must be above 0, not -1.0". A caller
    that knows the path of the setting puts it before the name."""

    def __init__(self, name: str, says: str) -> None:
        super().__init__(name, says)  # all arguments, since processes pickle the error
        self.name, self.says = name, says

    def __str__(self) -> str:
        return f"{self.name} {self.says}"


@dataclass(frozen=True)
class Range:
    """Valid numbers of a setting: from `least` to `most`, inclusive; `above` and `below` are exclusive bounds. NaN,
    infinities and absolute values above `LARGEST` are invalid."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def check(self, name: str, value: object, whole: bool = False) -> None:
        """Raise `OutOfRange` if the value is out of range or not a number; if `whole`, also if it is not an integer."""
        if not isinstance(value, Integral if whole else Real) or isinstance(value, bool):
            raise OutOfRange(name, f"must be {NAMES[int if whole else float]}, not {short(value)}")
        if not isinstance(value, Integral) and not isfinite(value):
            raise OutOfRange(name, f"must be a finite number, not {short(value)}")
        for says, end, wrong in (
            ("at least", -LARGEST if self.least is None else self.least, lambda end: value < end),
            ("above", self.above, lambda end: value <= end),
            ("at most", LARGEST if self.most is None else self.most, lambda end: value > end),
            ("below", self.below, lambda end: value >= end),
        ):
            if end is not None and wrong(end):
                raise OutOfRange(name, f"must be {says} {short(end)}, not {short(value)}")


LARGEST = 1e37  # below the maximum of fp32, 3.4e38, with a margin for products and sums
SEEDS = Range(0, 2**63 - 1)  # valid for every random number generator


class Checked:
    """Base of dataclasses that validate each field against the `Range` or `Literal` of its annotation.

    The range of a tuple applies to each element, and the length must match the annotation. The `__post_init__` of a
    subclass calls this one, then checks relations between fields. Raises `OutOfRange`.
    """

    def __post_init__(self) -> None:
        for name, words in choices(type(self)).items():
            if getattr(self, name) not in words:
                raise OutOfRange(name, not_among(getattr(self, name), words))
        for name, (allowed, whole, words) in ranges(type(self)).items():
            value = getattr(self, name)
            if value in words:
                continue
            numbers = value if isinstance(value, (tuple, list)) else (value,)
            for number in numbers:
                allowed.check(name, number, whole)
            if (count := lengths(type(self)).get(name)) and len(numbers) != count:
                raise OutOfRange(name, f"must be a list of {count} values, not {short(value)}")


@cache
def ranges(cls: type) -> dict[str, tuple[Range, bool, tuple[Any, ...]]]:
    """Return by field with a range: the range, True for integers only, and the valid values that are not numbers (None,
    or words of a `Literal`)."""
    found = {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        for note in getattr(hint, "__metadata__", ()):
            if isinstance(note, Range):
                kinds = leaves(hint)
                words = [word for kind in kinds for word in get_args(kind)] + [None] * (type(None) in kinds)
                found[name] = note, float not in kinds, tuple(words)
    return found


@cache
def lengths(cls: type) -> dict[str, int]:
    """Return the length of each field with a tuple of fixed length: 2 for `tuple[float, float]`."""
    found = {}
    for name, hint in get_type_hints(cls).items():
        for kind in (hint,) if get_origin(hint) is tuple else get_args(hint):  # each member of a union
            if get_origin(kind) is tuple and Ellipsis not in get_args(kind):
                found[name] = len(get_args(kind))
    return found


@cache
def choices(cls: type) -> dict[str, tuple[Any, ...]]:
    """Return the words of each `Literal` field."""
    hints = get_type_hints(cls)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


def leaves(hint: Any) -> set[Any]:
    """Return the elementary types in an annotation: for `tuple[int, ...] | None`, int, the ellipsis and None."""
    if get_origin(hint) is Annotated:
        return leaves(get_args(hint)[0])
    if get_origin(hint) is Literal or not get_args(hint):
        return {hint}
    return set().union(*map(leaves, get_args(hint)))


def not_among(value: object, choices: Iterable[object]) -> str:
    """Return the end of the message for an invalid choice: all choices, and the most similar one."""
    choices = list(choices)
    meant = nearest(value, choices)
    return f"cannot be {short(value)}: choose {listing(choices)}" + (f" (did you mean {meant!r}?)" if meant else "")


def listing(choices: Iterable[object]) -> str:
    """Return the `repr` of the choices, separated by commas."""
    return ", ".join(map(repr, choices))


def short(value: object) -> str:
    """Return the `repr` of a value, shortened if it is long; integers get thousands separators."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        value = int(value)
        digits = value.bit_length() * 0.30103
        return f"{value:,}" if digits < 25 else f"a number of {int(digits) + 1} digits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
