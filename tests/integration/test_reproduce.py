"""`limner reproduce`: every finding runs, is kept, and is not run again; Ctrl-C loses no trial that is done."""

import json
import os
import signal
import subprocess
import sys
import time
from html import escape
from xml.etree import ElementTree

import pytest

from limner.cli import main
from limner.experiments import EXPERIMENTS, load

#: Four trials of several seconds, so that the first one is saved well before the last.
REPRODUCE = [sys.executable, "-m", "limner", "reproduce", "grad-scales", "--quick"]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_quick_run_leaves_a_page_with_table_and_curves(name, tmp_path, capsys):
    assert main(["reproduce", name, "--quick", "-o", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert load(name).claim in output and "quick" in output
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert found["rows"] and all(len(row) == len(found["header"]) for row in found["rows"])
    assert found["holds"] is None  # quick trials cannot tell
    assert found["verdict"] in output and escape(found["verdict"]) in (tmp_path / f"{name}.html").read_text()
    for chart in tmp_path.glob(f"{name}-*.svg"):
        ElementTree.parse(chart)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "trials").rglob("*.json")}
    if name != "loss-scale":  # its few updates do not overflow
        assert len({path.read_bytes() for path in kept}) > min(1, len(kept) - 1)  # settings have an effect
    assert main(["reproduce", name, "--quick", "-o", str(tmp_path)]) == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "trials").rglob("*.json")} == kept


def test_without_a_name_the_findings_are_listed(capsys):
    assert main(["reproduce"]) == 0
    output = capsys.readouterr().out
    assert all(f"{name} " in output and load(name).claim in output for name in EXPERIMENTS)
    assert main(["reproduce", "loss-spike"]) == 2
    assert "unknown finding 'loss-spike'" in capsys.readouterr().err


@pytest.mark.slow
def test_an_interrupted_run_resumes(tmp_path):
    command = [*REPRODUCE, "-o", str(tmp_path)]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=os.environ)
    deadline = time.monotonic() + 120
    while not (kept := list(tmp_path.rglob("trials/**/*.json"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert b"the same command resumes" in process.stderr.read()
    before = {path: path.stat().st_mtime_ns for path in kept}
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert (tmp_path / "grad-scales.html").exists()
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_no_process(tmp_path):
    command = [*REPRODUCE, "-o", str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=os.environ)
    deadline = time.monotonic() + 120
    while not list(tmp_path.rglob("trials/**/*.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.communicate(timeout=30)  # until no process has its end of the pipe open
