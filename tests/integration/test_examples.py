"""The programs in examples/ run unchanged."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]


def run(name: str, *arguments: object, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, ROOT / "examples" / name, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=1_800)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_all_examples_are_run_here() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert all(f'run("{path.name}"' in text for path in (ROOT / "examples").glob("*.py"))


def test_draw(tmp_path: Path) -> None:
    output = run("draw.py", "a small red circle on a gray background", "circle", cwd=tmp_path)
    assert "circle-1.png: score" in output
    assert Image.open(tmp_path / "circle-2.png").text["caption"] == "a small red circle on a gray background"


@pytest.mark.slow
def test_train_on_a_folder(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for shade in range(40):
        Image.fromarray(np.full((64, 64, 3), shade * 6, np.uint8)).save(tmp_path / f"photos/{shade}.png")
        (tmp_path / f"photos/{shade}.txt").write_text(f"a plain picture of shade {shade}")
    assert "drawing.png: a plain picture" in run("train_on_a_folder.py", "photos", "run", 2, cwd=tmp_path)
    assert (tmp_path / "run/drawing.png").exists()


def test_sparse_attention(tmp_path: Path) -> None:
    losses = [float(line.split()[-1]) for line in run("sparse_attention.py", cwd=tmp_path).splitlines()]
    assert losses[-1] < losses[0]


def test_low_precision(tmp_path: Path) -> None:
    output = run("low_precision.py", cwd=tmp_path)
    first, last = map(float, re.match(r"loss ([\d.]+) at first, ([\d.]+) at the end", output).groups())
    assert last < 0.7 * first
    assert "torch.int16 and torch.int16" in output
    assert re.search(r"forward: (_int_mm|reference), 40 times", output)


def test_train_from_scratch_is_short() -> None:
    assert len((ROOT / "examples/train_from_scratch.py").read_text(encoding="utf-8").splitlines()) <= 80


@pytest.mark.slow
def test_train_from_scratch(tmp_path: Path) -> None:
    output = run("train_from_scratch.py", "run", cwd=tmp_path)  # exit code 1 if too few drawings are right
    assert re.search(r"\d+ of 64 drawings show what their captions say; the target is 70%", output)
    assert (tmp_path / "run/drawing.png").exists()
