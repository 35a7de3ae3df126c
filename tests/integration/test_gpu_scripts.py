"""`bench/gpu`: each script runs at a tiny size without a GPU, and the list of scripts names files that exist."""

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from icon_sets import archive
from limner.tasks import iconify
from limner.tasks.build_glyphs import write_glyphs

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "bench/gpu"
README = (FOLDER / "README.md").read_text("utf-8")


def run(script: str, out: Path, *options: str) -> dict:
    """The results that a script writes."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "OUT": str(out)}
    command = [sys.executable, str(FOLDER / f"{script}.py"), "--quick", *options]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=out.parent)
    assert process.returncode == 0, process.stderr[-4_000:]
    return json.loads((out / f"{script}.json").read_text())["results"]


@pytest.mark.slow
def test_glyphs_are_trained_packed_and_trained_further(tmp_path: Path) -> None:
    icons = {f"thing-{k}": {"body": f'<path d="M{k % 8} {k // 8}h8v4h-8z"/>'} for k in range(64)}
    facts = {"author": {"name": "A. Painter"}, "license": {"spdx": "MIT"}}
    sets = [{"prefix": f"set-{i}", "icons": icons, "info": {"name": f"Set {i}", **facts}} for i in range(8)]
    glyphs = [icon_set for path in sets for icon_set in iconify.read_sets(archive(tmp_path / "set.tgz", icons=path))]
    write_glyphs(tmp_path / "data", glyphs)
    shutil.make_archive(str(tmp_path / "glyphs"), "tar", tmp_path, "data")
    first = run("glyphs", tmp_path / "first", "--data", str(tmp_path / "glyphs.tar"))
    assert first["training 1"]["steps"] == 2 and "held-out combinations" in first["scores 1"]
    second = run("glyphs", tmp_path / "second", "--data", str(tmp_path / "data"), "--from", str(tmp_path / "first"))
    assert second["training 2"]["steps"] == 2 and second["training 1"] == first["training 1"]


@pytest.mark.slow
def test_drawing_and_training_are_timed_and_a_second_call_times_nothing_again(tmp_path: Path) -> None:
    results = run("llamagen", tmp_path / "first")
    for task in ("1 drawn", "4 drawn", "training"):
        assert results[task]["limner"]["ratio"] == 1
        assert 0 < results[task]["limner"]["seconds"] < 60
    assert run("llamagen", tmp_path / "second", "--from", str(tmp_path / "first")) == results


@pytest.mark.slow
def test_fused_layers_compute_the_block(tmp_path: Path) -> None:
    table = run("eight_bits", tmp_path / "out")["width 64"]
    largest = {"bf16": 0.01, "int8": 0.03, "float8": 0.1}  # of a relative error; 8 bits round to 2^-7 and 2^-3
    for name, row in table.items():
        assert 0 < row["error of branches"] < largest[name.split()[0]], name
        assert 0 < row["of weight gradient"] < largest[name.split()[0]], name
        assert row["milliseconds"] > 0
    assert {"int8 fused", "float8 fused"} < set(table)


@pytest.mark.slow
def test_a_step_and_the_optimizers_are_timed_by_kernel(tmp_path: Path) -> None:
    results = run("one_candidate", tmp_path / "out")
    drawing, optimizers = results["drawing"], results["optimizers"]
    assert 0 < drawing["share of the bound"] < 2
    assert drawing["bound, milliseconds"] == pytest.approx(drawing["share of the bound"] * drawing["milliseconds"])
    assert len(optimizers) == 3
    for result in (drawing, *optimizers.values()):
        times = [kernel["microseconds"] for kernel in result["kernels"]]
        assert times == sorted(times, reverse=True)
        assert times[0] > 0


@pytest.mark.slow
def test_checks_pass(tmp_path: Path) -> None:
    results = run("checks", tmp_path / "out")
    assert {name for name, result in results.items() if "error" in result} == set()
    assert set(results) == {"train", "draw", "resume", "tests", "zero2"}
    assert results["zero2"]["losses"] == pytest.approx(results["train"]["losses"], rel=1e-3)


@pytest.mark.slow
def test_trials_are_packed_and_continued(tmp_path: Path) -> None:
    options = ("--findings", "rms-predicts")
    first = run("spikes", tmp_path / "first", *options)
    again = run("spikes", tmp_path / "second", *options, "--from", str(tmp_path / "first"))
    assert first["trials"] == again["trials"] == 3
    assert again["rms-predicts"]["verdict"] == first["rms-predicts"]["verdict"]
    assert again["rms-predicts"]["seconds"] < first["rms-predicts"]["seconds"] / 4


@pytest.mark.slow
def test_parallel_sampling_takes_fewer_steps_for_the_same_tokens(tmp_path: Path) -> None:
    results = run("parallel", tmp_path / "out")
    for n in (1, 2):
        drawing = results[f"scenes, {n} drawn"]
        assert [way["tokens that differ"] for way in drawing.values()] == [0, 0, 0]
        graph, one_by_one, parallel = (way["steps"] for way in drawing.values())
        assert parallel < one_by_one / 2 == graph / 2
    assert len(results["scenes, pool of 2"]) == 3
    assert min(results["scenes, pool of 2"].values()) > 0


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    common = importlib.import_module("common")
    monkeypatch.setattr(common, "OUT", tmp_path)
    return common


def test_only_failed_and_missing_measurements_run_again(common: ModuleType, tmp_path: Path) -> None:
    options = argparse.Namespace(quick=True, earlier=tmp_path)
    first = common.Results("script", options)
    assert first.measure("works", lambda: 1) == 1
    assert "division by zero" in first.measure("fails", lambda: 1 / 0)["error"]
    second = common.Results("script", options)
    assert (second.measure("works", lambda: 2), second.measure("fails", lambda: 3)) == (1, 3)
    assert json.loads((tmp_path / "script.json").read_text())["results"] == {"works": 1, "fails": 3}
    options.quick = False
    assert common.Results("script", options).values == {}


def test_entries_name_scripts_that_exist_and_their_state() -> None:
    entries = re.split(r"^## ", README, flags=re.MULTILINE)[1:]
    entries = [entry for entry in entries if entry[0].isdigit()]
    assert [int(entry.split(".")[0]) for entry in entries] == list(range(1, len(entries) + 1))
    named = {name for entry in entries for name in re.findall(r"bench/gpu/\w+\.(?:py|sh)", entry)}
    assert named == {f"bench/gpu/{path.name}" for path in FOLDER.glob("*.py")} - {"bench/gpu/common.py"}
    for entry in entries:
        assert re.search(r"^- \[[ x]\] ", entry, re.MULTILINE)
        assert re.search(r"^Last measured: \S", entry, re.MULTILINE)
        assert re.search(r"\d+ minutes", entry)
