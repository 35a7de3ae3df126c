"""`UserError` for mistakes of users, suggestions for mistyped names, and escaping of untrusted text.

The command line prints the message of a `UserError` as one sentence and exits with code 2 (`--debug` also prints the
traceback).
"""

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches

__all__ = ["UserError", "closest_match", "did_you_mean", "escape_control"]

_MAX_LISTED = 30  # names in a message


class UserError(Exception):
    """A mistake that the user can fix. The message states the problem, its place and the fix."""


def closest_match(name: object, options: Iterable[object]) -> str | None:
    """Return the option most similar to `name`; None if no option is similar."""
    return next(iter(get_close_matches(str(name), map(str, options), 1, cutoff=0.5)), None)


def did_you_mean(name: object, options: Collection[object]) -> str:
    """Return the hint after an unknown name: "did you mean 'train'?" or a list, "choose a, b".

    The list has at most 30 options.
    """
    if match := closest_match(name, options):
        return f"did you mean {match!r}?"
    listed = [str(option) for option, _ in zip(options, range(_MAX_LISTED), strict=False)]
    listed += ["..."] * (len(options) > _MAX_LISTED)
    return f"choose {', '.join(listed)}" if options else "no choice exists"


# Control characters (C0, DEL, C1), line and paragraph separators, bidirectional controls, surrogates, and
# noncharacters: they control a terminal, mislead a reader, or cannot be encoded.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def escape_control(text: object) -> str:
    """Return untrusted text (a caption, name, path or message) as one safe line.

    Whitespace control characters become spaces; other unprintable characters become escapes such as \\x1b.
    """
    return _UNPRINTABLE.sub(lambda x: " " if x[0].isspace() else x[0].encode("unicode_escape").decode(), str(text))
