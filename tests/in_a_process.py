"""Checks in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path


def passes(checks: Path, **environment: str) -> None:
    """Triton decides for the interpreter when it is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", checks],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4_000:] + done.stderr
