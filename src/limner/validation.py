"""Ranges of settings: `lr: Annotated[float, Range(above=0)]` is checked whenever an instance is made, and so is a word.

The base class `Checked` looks at the annotations, so that Python, JSON (`limner.config`) and the command line
(`limner.cli.arguments`) refuse the same values with the same sentence.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import isfinite
from numbers import Integral, Real
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from limner.errors import nearest

NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}  # of types, for messages


class OutOfRange(ValueError):
    """A setting out of its range. `says` is what the sentence says of `name`: "must be above 0, not -1.0". A caller
    that knows where the setting is puts the path before the name."""

    def __init__(self, name: str, says: str) -> None:
        super().__init__(name, says)  # all that it is made of: processes send it to one another
        self.name, self.says = name, says

    def __str__(self) -> str:
        return f"{self.name} {self.says}"


@dataclass(frozen=True)
class Range:
    """Numbers that a setting may have: from `least` to `most`, or `above` and `below` where the end itself is
    excluded. Never nan, never infinite, and never beyond `LARGEST` or its negative."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def check(self, name: str, value: object, whole: bool = False) -> None:
        """Raises `OutOfRange` for a number outside, for what is no number, and, if `whole`, for fractions."""
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


LARGEST = 1e37  # torch takes no number that fp32 cannot hold, from 3.4e38 on, and products and sums need room
SEEDS = Range(0, 2**63 - 1)  # what every generator of random numbers takes


class Checked:
    """Base of dataclasses that check each field against the `Range` in its annotation, or the words of its `Literal`;
    the range of a tuple holds for each of its numbers, and there are as many of these as the annotation says. A
    subclass's `__post_init__` calls this one, then checks relations between fields."""

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
    """Of each field with a range: the range, whether it holds whole numbers, and what it may be instead of a number:
    None, or a word of a `Literal`."""
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
    """How many values each field holds whose tuple says so: 2 of `tuple[float, float]`."""
    found = {}
    for name, hint in get_type_hints(cls).items():
        for kind in (hint,) if get_origin(hint) is tuple else get_args(hint):  # of a union, each
            if get_origin(kind) is tuple and Ellipsis not in get_args(kind):
                found[name] = len(get_args(kind))
    return found


@cache
def choices(cls: type) -> dict[str, tuple[Any, ...]]:
    """The words of each field that is a `Literal`."""
    hints = get_type_hints(cls)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


def leaves(hint: Any) -> set[Any]:
    """The types that an annotation is made of: int and None of `tuple[int, ...] | None`."""
    if get_origin(hint) is Annotated:
        return leaves(get_args(hint)[0])
    if get_origin(hint) is Literal or not get_args(hint):
        return {hint}
    return set().union(*map(leaves, get_args(hint)))


def not_among(value: object, choices: Iterable[object]) -> str:
    """What a message says of a setting whose value is none of the choices: all of them, and the nearest."""
    choices = list(choices)
    meant = nearest(value, choices)
    return f"cannot be {short(value)}: choose {listing(choices)}" + (f" (did you mean {meant!r}?)" if meant else "")


def listing(choices: Iterable[object]) -> str:
    """Choices as Python writes them."""
    return ", ".join(map(repr, choices))


def short(value: object) -> str:
    """A value as Python writes it, shortened if it is long."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        value = int(value)
        digits = value.bit_length() * 0.30103
        return f"{value:,}" if digits < 25 else f"a number of {int(digits) + 1} digits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
