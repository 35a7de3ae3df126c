"""Commands and programs of README and docs, run in a reader's folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of each `sh` and `python` block of a page, by its path in the repository."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```(sh|python)\n(.*?)^```", text, re.M | re.S)


def steps(page: str) -> list[tuple[str, str]]:
    """The commands and programs of a page in their order: ("sh", a command without its comment; continued lines are
    one) or ("python", a block)."""
    found = []
    for kind, block in blocks(page):
        lines = [block] if kind == "python" else block.replace("\\\n", "").splitlines()
        found += [(kind, line if kind == "python" else re.sub(r"\s+# .*$", "", line)) for line in lines]
    return found


def add_programs(folder: Path) -> None:
    """Write `limner`, `python` and `torchrun` of this environment to `folder/bin`."""
    (folder / "bin").mkdir()
    for name, runs in {"limner": "-m limner", "python": "", "torchrun": "-m torch.distributed.run"}.items():
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} {runs} "$@"\n')
        (folder / "bin" / name).chmod(0o755)


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that must succeed, with the programs of `add_programs` on the path and one thread."""
    env = {
        **os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    done = subprocess.run(["bash", "-euc", command], cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done
