"""Paired differences of two files of results."""

import json
from pathlib import Path

import numpy as np
import pytest

from limner.cli.evaluate import main
from limner.errors import UserError
from limner.evaluation.compare import compare_files
from limner.evaluation.confidence import paired_difference
from limner.evaluation.result import EvalResult, save_results


def write(path: Path, right: np.ndarray, seed: int = 0, **more: object) -> Path:
    """Write results of captions whose candidate is right or wrong."""
    cases = [
        {"caption": f"caption {i}", "seed": seed + i, "combination": str(i % 7), "values": {"best of 1": float(value)}}
        for i, value in enumerate(right)
    ]
    save_results(path, [EvalResult(title="all", rows={}, cases=cases)], model=path.stem, **more)
    return path


def test_the_difference_is_paired_over_common_captions(tmp_path):
    rng = np.random.default_rng(0)
    before = rng.random(200) < 0.5
    after = before | (rng.random(200) < 0.2)
    result = compare_files(write(tmp_path / "a.json", before), write(tmp_path / "b.json", after[:150]))
    row = result.rows["best of 1"]
    expected = paired_difference(after[:150], before[:150], [str(i % 7) for i in range(150)])
    assert (row["difference"].value, row["difference"].low) == (pytest.approx(expected.value), expected.low)
    assert "better" in result.table() and "150 captions of both" in result.title
    assert row["first"].value == pytest.approx(before[:150].mean())


def test_the_command_prints_and_writes_the_differences(tmp_path, capsys):
    files = [write(tmp_path / f"{name}.json", np.arange(70) % 2 == 0) for name in ("a", "b")]
    main(["compare", *map(str, files), "-o", str(tmp_path / "out.json")])
    assert "not significant" in capsys.readouterr().out
    assert (
        json.loads((tmp_path / "out.json").read_text())["results"][0]["rows"]["best of 1"]["difference"]["value"] == 0
    )


def test_files_without_common_captions_are_one_sentence(tmp_path):
    a = write(tmp_path / "a.json", np.ones(3))
    with pytest.raises(UserError, match="share no caption"):
        compare_files(a, write(tmp_path / "b.json", np.ones(3), seed=100))
    for bad in (
        {},
        [],
        {"results": []},
        {"results": [{"cases": []}]},
        {"results": [{"cases": [{"values": {"a": 7}}]}]},
    ):
        (tmp_path / "bad.json").write_text(json.dumps(bad))
        with pytest.raises(UserError, match="not a file of results"):
            compare_files(a, tmp_path / "bad.json")
