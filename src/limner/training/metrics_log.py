"""`metrics.jsonl`: a JSON object on a line for each logged step, to be read while the run goes on.

A run that is killed has usually logged steps past its last checkpoint. The resumed run repeats these
steps, so `MetricsLog` first removes their lines (atomically), and a line that the kill cut
short: every step is in the file once. NaN and infinities are written as null.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from limner.atomic_io import atomic_write_text, naming
from limner.json_files import read_lines, to_json


class MetricsLog:
    """Appends to a metrics file, beginning after `step`, or at its end if that is None; each line is flushed as it is
    written.

    If several processes train one model, only one of them `writes`.
    """

    def __init__(self, path: Path, step: int | None = 0, writes: bool = True) -> None:
        self.last: Mapping[str, Any] = {}
        if step is not None:
            kept = [row for row in read_metrics(path) if row["step"] <= step]
            self.last = kept[-1] if kept else {}
            if writes and path.exists():
                atomic_write_text(path, "".join(to_json(row) + "\n" for row in kept))
        self._path, self._file = path, path.open("a", encoding="utf-8") if writes else None

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one line; `row` has "step" among its keys."""
        if self._file:
            with naming(self._path):
                self._file.write(to_json(row) + "\n")
                self._file.flush()
        self.last = row

    def close(self) -> None:
        if self._file:
            with suppress(OSError):  # all lines are flushed but one that could not be
                self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, which may be absent, in use, or cut short in its last line. Each has a whole "step";
    other lines are left out."""
    return [row for row in read_lines(path) if type(row.get("step")) is int] if path.exists() else []
