"""Files that a command left on the disk, without times and dates, which differ between runs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Files that tell how a run went, not what came of it; and locks, which hold nobody back once their holder is gone.
_TALK = {"timings.json", "contrastive.log", ".lock"}
_START = re.compile(r"start-\d{8}")  # one stays, with the number of the starts that a run has had
_TIMES = {"seconds", "samples_per_s", "created"}


def tree(folder: Path) -> dict[str, str]:
    """Relative path -> digest of what is there, for each file below the folder; empty folders have one too.

    Of a run's checkpoints the last is compared: where an interrupted one saved the others is its own affair. Caches of
    tokens are named after the times of the files that they were made from: here after what they hold.
    """
    found = {}
    caches = {cache.name: _digest_of(sorted(cache.glob("*.safetensors"))) for cache in folder.rglob("tokens/*")}
    earlier = {old for kept in folder.rglob("checkpoints") for old in sorted(kept.glob("step-????????"))[:-1]}
    for path in sorted(folder.rglob("*")):
        if earlier & {path, path.parent}:
            continue
        parts = (_START.sub("start", part) for part in path.relative_to(folder).parts)
        name = "/".join(caches.get(part, part) for part in parts)
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        elif path.is_dir():
            if not any(path.iterdir()):
                found[name] = "empty folder"
        elif path.name not in _TALK:
            found[name] = _digest(path)
    return found


def assert_same(ours: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Both trees are equal; the message names the files at which they differ."""
    lines = []
    for name in sorted({*ours, *expected}):
        a, b = ours.get(name), expected.get(name)
        if a != b:
            lines.append(f"{name}: " + ("missing" if a is None else "left behind" if b is None else "differs"))
    assert not lines, "the result is not that of an uninterrupted run: " + "; ".join(lines[:12])


def _digest_of(files: list[Path]) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest()[:16]


def _digest(path: Path) -> str:
    data = path.read_bytes()
    if path.name == "SHA256SUMS":  # of files in which times stand
        sums = [line.split() for line in data.decode().splitlines()]
        right = all(hashlib.sha256((path.parent / name).read_bytes()).hexdigest() == sum for sum, name in sums)
        return " ".join(name for _, name in sums) + (" as summed" if right else " not as summed")
    if path.suffix == ".json":
        data = json.dumps(_timeless(json.loads(data))).encode()
    elif path.suffix == ".jsonl":
        data = "\n".join(json.dumps(_timeless(json.loads(line))) for line in data.splitlines()).encode()
    elif path.suffix == ".md":
        data = re.sub(rb"- created: .*", b"", data)
    elif path.suffix == ".html":
        data = re.sub(rb"<h2>Time</h2>.*?<h2>", b"", data, flags=re.DOTALL)
    return hashlib.sha256(data).hexdigest()


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(inner) for key, inner in value.items() if key not in _TIMES}
    return [_timeless(inner) for inner in value] if isinstance(value, list) else value
