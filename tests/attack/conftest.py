"""The attack: what kills, tears and fuzzes. It runs with `pytest -m attack` alone, and prints what it tried.

    LIMNER_ATTACK_SEED    seed of all that is chosen at random (0)
    LIMNER_ATTACK_SHARE   share of the cases to try, from 0 to 1 (1)

A case that fails leaves its folder, which the message names.
"""

import json
import os
import random
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # where its helpers lie

SEED = int(os.environ.get("LIMNER_ATTACK_SEED", "0"))
SHARE = float(os.environ.get("LIMNER_ATTACK_SHARE", "1"))
T = TypeVar("T")


def pytest_ignore_collect(collection_path, config):
    """Nothing here is even imported unless it is asked for."""
    if "attack" not in (config.getoption("-m") or "") and collection_path.name.startswith("test_"):
        return True
    return None


class Tally:
    """Counts the cases of a kind, and says at the end which have failed.

    Attributes:
        random: generator of this kind's cases.
    """

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder, self.tried, self.failures, self.begun = kind, folder, 0, [], time.monotonic()
        self.random = random.Random(f"{SEED} {kind}")

    def share(self, cases: Sequence[T], least: int = 1) -> list[T]:
        """The share of the cases that is to be tried, in their order."""
        number = min(len(cases), max(least, round(SHARE * len(cases))))
        return [cases[i] for i in sorted(self.random.sample(range(len(cases)), number))]

    @contextmanager
    def case(self, name: str) -> Iterator[Path]:
        """A folder to try a case in; an assertion that fails there is counted, and the folder stays."""
        self.tried += 1
        place = self.folder / f"{self.tried:05d}"
        place.mkdir(parents=True)
        try:
            yield place
        except AssertionError as wrong:
            output = f"--- {name}, in {place}\n{str(wrong)[:4_000]}\n".encode(errors="backslashreplace")
            (place / "WHY").write_bytes(output)
            self.failures.append(output.decode())
        else:
            shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def tally(tmp_path, record_property):
    """A context manager: the `Tally` of a kind of case. It counts the cases; failures are raised when the test ends."""
    failures = []

    @contextmanager
    def counting(kind):
        one = Tally(kind, tmp_path / re.sub(r"\W+", "-", kind))
        yield one
        seconds = time.monotonic() - one.begun
        row = {"kind": kind, "tried": one.tried, "failed": len(one.failures), "seconds": seconds}
        record_property("attack", json.dumps(row))
        if one.failures:
            failures.append(f"{kind}: {len(one.failures)} of {one.tried} failed, seed {SEED}")
            failures.extend(one.failures[:12])

    yield counting
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    from processes import Server

    one = Server(tmp_path_factory.mktemp("server"))
    yield one
    one.close()


def pytest_report_header(config):
    if "attack" in (config.getoption("-m") or ""):
        return f"attack: seed {SEED}, share {SHARE:g}"
    return None


def pytest_terminal_summary(terminalreporter):
    rows = [
        json.loads(value)
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "teardown"
        for name, value in report.user_properties
        if name == "attack"
    ]
    if not rows:
        return
    terminalreporter.section(f"attack, seed {SEED}, share {SHARE:g}")
    terminalreporter.write_line("| what | tried | failed | seconds |\n|---|---|---|---|")
    for row in sorted(rows, key=lambda row: row["kind"]):
        terminalreporter.write_line(f"| {row['kind']} | {row['tried']:,} | {row['failed']:,} | {row['seconds']:.0f} |")
    tried, failed = (sum(row[name] for row in rows) for name in ("tried", "failed"))
    terminalreporter.write_line(f"| all | {tried:,} | {failed:,} | |")


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    """A folder with something to read for each command."""
    import torch
    from miniature import ground_for_imports, world

    from tiny import tiny_pipe

    folder = tmp_path_factory.mktemp("ground") / "work"
    world(folder)
    tiny_pipe().save_pretrained(folder / "tiny")
    tiny_pipe(patches=True).save_pretrained(folder / "eight", torch.int8)
    ground_for_imports(folder)
    return folder
