"""Commands that were killed, given again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from processes import Ended, Server

PATIENCE = 30  # seconds that a helper of a killed process may take to notice


def others(folder: Path) -> list[int]:
    """Processes that work in a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").resolve() == folder and "Z" not in (entry / "stat").read_text().rpartition(")")[2][:3]:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def go_on(server: Server, argv: Sequence[object], folder: Path, **options: Any) -> Ended:
    """Give the command again. It may refuse, in a sentence, as long as a helper of the killed one lives."""
    deadline = time.monotonic() + PATIENCE
    while True:
        company = others(folder)
        ended = server.run(argv, folder, **options)
        if ended.code == 0:
            return ended
        refused = ended.code == 2 and company and time.monotonic() < deadline
        assert refused, f"the same command does not resume\n{ended.command}"
        time.sleep(0.2)


def alone(folder: Path) -> None:
    """Wait until no process works in the folder."""
    deadline = time.monotonic() + PATIENCE
    while company := others(folder):
        assert time.monotonic() < deadline, f"a helper continues without the process that started it: {company}"
        time.sleep(0.05)
