"""`CollapseWarning` warns of a collapsed codebook, not of a single batch with few codes."""

import json
import warnings
from types import SimpleNamespace

import pytest

from limner.runs.monitors import CollapseWarning


def report(code_counts: list[float], vocab: int = 1_000, resumed_at: int | None = None) -> None:
    monitor = CollapseWarning(vocab)
    for i, codes in enumerate(code_counts):
        if i == resumed_at:
            state = monitor.state_dict()
            monitor = CollapseWarning(vocab)
            monitor.load_state_dict(json.loads(json.dumps(state)))
        monitor.before_log(SimpleNamespace(step=10 * i), {"codes": codes})


@pytest.mark.parametrize("resumed_at", [None, 55, 150])  # before the warning, and after
def test_a_collapse_warns_once(resumed_at):
    with pytest.warns(UserWarning, match="99 of 1000 codes are in use after 590 steps") as warned:
        report([99.0] * 200, resumed_at=resumed_at)
    assert len(warned) == 1


@pytest.mark.parametrize(
    "code_counts",
    [
        [1.0] * 50 + [200.0] * 50,  # the beginning, when no codebook is alive yet
        [99.0] * 55 + [101.0, 99.0] * 50,  # now and then
        [101.0] * 200,
    ],
)
def test_few_codes_now_and_then_do_not_warn(code_counts):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report(code_counts)
