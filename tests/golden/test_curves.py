"""Each objective loses what it lost when its curve was committed: see make.py."""

import json

import pytest

from golden import make


@pytest.mark.parametrize("case", make.CURVES, ids=lambda case: case.__name__)
def test_a_curve_is_as_it_was(case) -> None:
    kept = json.loads(make.FILE.read_text(encoding="utf-8"))[case.__name__]
    found = make.measured(case)
    assert found.keys() == kept.keys() and len(kept["loss"]) == 20
    for name in kept:
        assert found[name] == pytest.approx(kept[name], rel=1e-4), name
