"""Tables of any format: broken links, and too many columns."""

import json

import pytest

from limner.data.open_source import open_source
from limner.errors import UserError
from table_rows import outcomes, png


def test_links_without_end_are_missing_pictures(tmp_path):
    (tmp_path / "1.png").write_bytes(png())
    (tmp_path / "loop.png").symlink_to("loop.png")
    rows = [{"caption": "a", "image": name} for name in ("loop.png", "loop.png/x", "x" * 300, "1.png/x")]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert outcomes(open_source(tmp_path / "t.jsonl")) == ["[missing image]"] * 4


def test_too_many_columns(tmp_path):
    (tmp_path / "t.csv").write_text(",".join(f"c{n}" for n in range(20_000)) + "\n1,2\n")
    with pytest.raises(UserError, match="20,000 columns") as caught:
        open_source(tmp_path / "t.csv")
    assert len(str(caught.value)) < 500
