"""Hostile bytes and values, and the rule that every command keeps to."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from processes import GIBIBYTE, Ended

SECONDS = 60
MEMORY = 4 * GIBIBYTE
_RAW = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

#: Numbers in words, as an option or a cell of a table may have them.
NUMBERS = (
    "-1", "0", "-0", "1", "1e6", "1e308", "1e39", "1e-320", "5e-324", "nan", "inf", "-inf", "2147483648",
    "18446744073709551616", "1000000000000", "9" * 400, "0x10", "1_000", "١٢", "1.5", "-5", "1e400",
)  # fmt: skip
TEXTS = (
    "", " ", "\t", "\n", "None", "true", "false", "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\x9b31m", "\u202ereversed",
    "a\x00b", "a\rb", "\udcff\udcfe", "\U0001f469\u200d\U0001f692", "\u0301" * 500, "1-" * 2000, "a" * 100_000,
    "<script>",
    "%s%n%d", "{0}", "a/../passwd", "/dev/zero", "/dev/full", ".", "..", "/", "~", "-", "--", "--help", "*",
    "[",
    "'; rm -rf x", "名" * 80, "\ufeff", "\ufffe", "(" * 3000, "x " * 30_000,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**30, -(10**12), 0.5, 1e308, -1e308, float("nan"), float("inf"),
    "", "x", [], {}, [1], [None], [[]], {"a": 1}, [10**9] * 3, *TEXTS[:16],
)  # fmt: skip


def check_outcome(
    ended: Ended, allowed: Sequence[Path], forbidden: Sequence[Path] = (), codes: Sequence[int] = (0, 2)
) -> None:
    """Exit 0, or exit 2 and one sentence; in time, in memory, with no raw control character, with no change outside the
    folders `allowed` and no look into `forbidden`."""
    command = ended.command
    assert not ended.hung and ended.seconds < SECONDS, f"hangs: {command}"
    assert ended.peak < MEMORY, f"takes {ended.peak / GIBIBYTE:.1f} GiB: {command}"
    assert "Traceback" not in ended.err and "Fatal Python error" not in ended.err, f"traceback: {command}"
    assert ended.code in codes, f"ends with code {ended.code}: {command}"
    raw = _RAW.search(ended.out + ended.err)
    assert raw is None, f"writes {raw and raw[0]!r} to the terminal: {command}"
    sentences = [
        line
        for line in ended.err.splitlines()
        if line.startswith("limner: ") and not line.startswith("limner: warning: ")
    ]
    if ended.code == 2:
        last = ended.err.rstrip("\n").rpartition("\n")[2]
        assert len(sentences) == 1 and sentences[0] == last, f"does not end with one sentence: {command}"
    elif ended.code == 0:
        assert not sentences, f"complains and ends with 0: {command}"
    for line in ended.log:
        kind, operation, path = line.split(" ", 2)
        where = Path(path)
        if kind == "W":
            inside = any(where == place or place in where.parents for place in allowed)
            beside = any(str(where).startswith(f"{place.parent}/.{place.name}.") for place in allowed)
            assert inside or beside, f"{operation} of {path}, which is outside of its folder: {command}"
        else:
            seen = [place for place in forbidden if where == place or place in where.parents]
            assert not seen, f"reads {path}, which is none of its business: {command}"


def mutate(rng: random.Random, data: bytes, splices: Sequence[bytes] = ()) -> bytes:
    """The data with a few random defects."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(out) + 1)
        length = min(len(out) - at, int(rng.expovariate(1 / 16)) + 1)
        kind = rng.randrange(9)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(out):
            out[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFE, 0xFF, 0x0A, 0x22, 0x5C))
        elif kind == 2:
            del out[at:]
        elif kind == 3:
            del out[at : at + length]
        elif kind == 4:
            out[at:at] = out[at : at + length] * rng.choice((1, 2, 50))
        elif kind == 5:
            out[at:at] = rng.randbytes(length)
        elif kind == 6:
            out[at : at + 4] = rng.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f"))
        elif kind == 7 and splices:
            other = rng.choice(splices)
            out[at:] = other[rng.randrange(len(other) + 1) :]
        else:
            swap = rng.randrange(len(out) + 1)
            out[at : at + length], out[swap : swap + length] = out[swap : swap + length], out[at : at + length]
    return bytes(out)


def mutate_json(rng: random.Random, value: Any) -> Any:
    """The JSON value with one place changed: another value, one less, one more, a key of another name."""
    places: list[tuple[Any, Any]] = []

    def walk(inner: Any) -> None:
        for key in inner if isinstance(inner, dict) else range(len(inner)) if isinstance(inner, list) else ():
            places.append((inner, key))
            walk(inner[key])

    value = json.loads(json.dumps(value))
    walk(value)
    holder, key = rng.choice(places)
    kind = rng.randrange(8)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice(TEXTS)] = holder.pop(key)
    elif kind == 2 and isinstance(holder[key], int | float):
        holder[key] = rng.choice((holder[key] * 2, -holder[key], holder[key] + 1, holder[key] * 10**6, holder[key] / 3))
    elif kind == 3:
        holder[key] = holder[rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))]
    else:
        holder[key] = rng.choice(VALUES)
    return value


def dump(value: Any) -> str:
    """Return JSON with all that Python's reader accepts: NaN, and lone surrogates as escapes."""
    return json.dumps(value)
