"""`metrics.jsonl`: a JSON object on a line for each logged step, to be read while the run goes on.

A run that is killed has usually logged steps past its last checkpoint. The resumed run repeats these
steps, so `MetricsLog` first removes their lines (atomically), and a line that the kill cut
short: every step is in the file once. Values that JSON cannot express (NaN, infinities)
are written as null.
"""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from limner.atomic_io import atomic_write_text, naming


class MetricsLog:
    """Appends to a metrics file, beginning after `step`, or at its end if that is None; each line is flushed as it is
    written.

    If several processes train one model, only one of them `writes`.
    """

    def __init__(self, path: Path, step: int | None = 0, writes: bool = True) -> None:
        self.last: Mapping[str, Any] = {}
        if step is not None:
            kept = [row for row in read_metrics(path) if row.get("step", 0) <= step]
            self.last = kept[-1] if kept else {}
            if writes and path.exists():
                atomic_write_text(path, "".join(map(_line, kept)))
        self._path, self._file = path, path.open("a", encoding="utf-8") if writes else None

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one line; `row` has "step" among its keys."""
        if self._file:
            with naming(self._path):
                self._file.write(_line(row))
                self._file.flush()
        self.last = row

    def close(self) -> None:
        if self._file:
            with suppress(OSError):  # all lines are flushed but one that could not be
                self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, which may be absent, in use, or cut short in its last line."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return [row for row in rows if isinstance(row, dict)]


def _line(row: Mapping[str, Any]) -> str:
    broken = {k: None for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
    return json.dumps({**row, **broken}, allow_nan=False) + "\n"
