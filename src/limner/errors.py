"""`UserError` for users' mistakes, the name that a mistyped one probably meant, and text from outside made printable.

The command line prints the error's text as one sentence and exits with code 2 (`--debug` shows the traceback).
"""

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches

_LISTED = 30  # names that a message lists at most


class UserError(Exception):
    """A mistake the user can mend. The message says what is wrong, where, and how to mend it."""


def nearest(name: object, options: Iterable[object]) -> str | None:
    """The option that was probably meant by a name that is none of them; None if none is like it."""
    return next(iter(get_close_matches(str(name), map(str, options), 1, cutoff=0.5)), None)


def suggestion(name: object, options: Collection[object]) -> str:
    """What a message says after a name that is none of the options: "did you mean 'train'?" or "there are a, b".

    Of many options the first 30 are listed.
    """
    if meant := nearest(name, options):
        return f"did you mean {meant!r}?"
    listed = [str(option) for option, _ in zip(options, range(_LISTED), strict=False)]
    listed += ["..."] * (len(options) > _LISTED)
    return f"there are {', '.join(listed)}" if options else "there are none"


# Control characters (C0, DEL, C1), ends of lines and paragraphs, overrides of the direction of writing, halves of
# surrogate pairs, and what is no character: they steer a terminal, deceive a reader, or cannot be encoded.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def printable(text: object) -> str:
    """A caption, name, path or message from outside as one harmless line: white space becomes a space, and a
    character that steers a terminal becomes its number, as in \\x1b."""

    def shown(match: re.Match[str]) -> str:
        character = match[0]
        code = ord(character)
        return " " if character.isspace() else f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"

    return _UNPRINTABLE.sub(shown, str(text))
