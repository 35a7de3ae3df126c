"""Requests that a tool generates from the server's OpenAPI description: valid, invalid, and of undeclared methods."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("schemathesis")

from servers import serve
from tiny import tiny_pipe

SECONDS = os.environ.get("LIMNER_SCHEMA_SECONDS")  # of a search with other requests in each run


@pytest.mark.slow
def test_generated_requests_get_the_answers_of_the_description(tmp_path):
    torch.manual_seed(0)
    config = Path(__file__).with_name("schemathesis.toml")
    with serve(tiny_pipe().save_pretrained(tmp_path / "tiny")) as server:
        url = f"http://127.0.0.1:{server.port}/openapi.json"
        options = ["--phases", "coverage,fuzzing", "--continue-on-failure"]
        options += ["--max-time", SECONDS] if SECONDS else ["--seed", "0", "--max-examples", "20"]
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run", url, *options]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=900 + int(SECONDS or 0), check=False
        )
        alive = server.send("GET", "/health")[0] == 200
    assert done.returncode == 0 and alive, done.stdout[-5_000:]
    generated = re.search(r"(\d+) generated", done.stdout)
    assert generated and int(generated[1]) > 100
    assert not [line for line in server.log if " 500 " in line or "Traceback" in line]
