"""`metrics.jsonl`: one JSON object per line for each logged step, readable during the run.

A run that is killed has usually logged steps past its last checkpoint. The resumed run repeats these steps, so
`MetricsLog` first removes their lines, and a truncated last line, atomically: every step is in the file once. NaN and
infinities are written as null.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from limner.atomic_io import atomic_write_text, with_filename
from limner.json_files import read_lines, to_json

__all__ = ["MetricsLog", "read_metrics"]


class MetricsLog:
    """Appends to a metrics file after removing the rows past `step`. Each line is flushed.

    If several processes train one model, only one of them `writes`.
    """

    def __init__(self, path: Path, step: int = 0, writes: bool = True) -> None:
        rows = [row for row in read_metrics(path) if row["step"] <= step]
        self.last: Mapping[str, Any] = rows[-1] if rows else {}
        if writes and path.exists():
            atomic_write_text(path, "".join(to_json(row) + "\n" for row in rows))
        self._path, self._file = path, path.open("a", encoding="utf-8") if writes else None

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one line; `row` must have the key "step"."""
        if self._file:
            with with_filename(self._path):
                self._file.write(to_json(row) + "\n")
                self._file.flush()
        self.last = row

    def close(self) -> None:
        if self._file:
            with suppress(OSError):  # `write` has flushed, or raised an error
                self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file, which may be missing, in use, or truncated in its last line. Lines without
    an integer "step" are left out."""
    return [row for row in read_lines(path) if type(row.get("step")) is int] if path.exists() else []
