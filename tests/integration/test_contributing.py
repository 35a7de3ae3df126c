"""The examples of CONTRIBUTING.md run as they stand, in their order, and do what the text says."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import limner.cli
from limner.data.datasets import ImageCaptionDataset
from limner.layers.attention import attend, visible
from limner.layers.patterns import PATTERNS
from limner.layers.sparse import SparseAttention

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
PATTERN, SOURCE, OBJECTIVE, COMMAND, LINE = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)


def test_a_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(PATTERNS, "diagonal", raising=False)
    exec(PATTERN, {})
    pattern = PATTERNS["diagonal"]((6, 5), 3)
    assert pattern.offsets == (0, 6, 12)
    q, k, v = torch.randn(3, 2, 2, 4 + 30, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(SparseAttention(pattern, 4)(q, k, v), attend(q, k, v, visible(pattern, 4)))


def test_a_source_and_an_objective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(SOURCE, names)
    exec(OBJECTIVE, names)
    assert names["result"].step == 3
    assert (tmp_path / "run/metrics.jsonl").exists()
    read = ImageCaptionDataset(names["Grays"](), 32)
    read.load(np.array([3]))
    assert dict(read.rejected) == {"missing": 1}


def test_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(limner.cli, "COMMANDS", dict(limner.cli.COMMANDS))
    (tmp_path / "greet.py").write_text(COMMAND)
    monkeypatch.setattr(limner.cli, "__path__", [*limner.cli.__path__, str(tmp_path)])
    exec(LINE, vars(limner.cli))
    assert limner.cli.main(["greet", "world"]) == 0
    assert capsys.readouterr().out == "hello, world\n"
    assert limner.cli.main(["greet", " "]) == 2
    with pytest.raises(SystemExit, match="0"):
        limner.cli.main(["greet", "--help"])
    assert "Say hello to somebody" in capsys.readouterr().out
