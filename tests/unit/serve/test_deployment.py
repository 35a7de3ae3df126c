"""The unit of systemd and the container file in examples/serve, as far as a machine without both can tell."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from limner.cli.arguments import parse
from limner.cli.serve import Serve

ROOT = Path(__file__).parents[3]
UNIT = (ROOT / "examples/serve/limner.service").read_text("utf-8")
CONTAINER = (ROOT / "examples/serve/Containerfile").read_text("utf-8")


def commands() -> list[list[str]]:
    """The words of both commands after `limner serve`."""
    words = re.search(r"^ExecStart=(.*)$", UNIT, re.MULTILINE)[1].split()
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)$", CONTAINER, re.MULTILINE)[1])
    assert words[0].endswith("/limner") and entry[0] == "limner"
    return [words[1:], entry[1:]]


@pytest.mark.parametrize("words", commands())
def test_both_commands_are_open_to_others_and_ask_for_keys(words):
    assert words[0] == "serve"
    options = parse(Serve, words[1:], "limner serve")
    assert options.host == "0.0.0.0" and options.keys is not None


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path):
    unit = tmp_path / "limner.service"
    unit.write_text(UNIT.replace("/opt/limner/bin/limner", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    unit.write_text(UNIT.replace("ProtectSystem=strict", "ProtectSystem=odd"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert "protect system" in done.stderr  # so that the check can fail


def test_the_container_copies_what_the_package_is_built_from():
    sources = [word for line in re.findall(r"^COPY (.*) \S+$", CONTAINER, re.MULTILINE) for word in line.split()]
    assert all((ROOT / source).exists() for source in sources)
    assert {"pyproject.toml", "README.md", "LICENSE", "src"} == set(sources)
