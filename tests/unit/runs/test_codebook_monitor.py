"""A collapsed codebook is said aloud; a batch with few codes is not a collapse."""

import json
import warnings
from types import SimpleNamespace

import pytest

from limner.runs.codebook_monitor import CollapseWarning


def report(found: list[float], vocab: int = 1_000, resumed_at: int | None = None) -> None:
    watching = CollapseWarning(vocab)
    for i, codes in enumerate(found):
        if i == resumed_at:
            state = watching.state_dict()
            watching = CollapseWarning(vocab)
            watching.load_state_dict(json.loads(json.dumps(state)))
        watching.on_report(SimpleNamespace(step=10 * i), {"codes": codes})


@pytest.mark.parametrize("resumed_at", [None, 55, 150])  # before it is said, and after
def test_few_codes_for_long_are_a_collapse_and_said_once(resumed_at):
    with pytest.warns(UserWarning, match="99 of 1000 codes are in use after 590 steps") as said:
        report([99.0] * 200, resumed_at=resumed_at)
    assert len(said) == 1


@pytest.mark.parametrize(
    "found",
    [
        [1.0] * 50 + [200.0] * 50,  # the beginning, when no codebook is alive yet
        [99.0] * 55 + [101.0, 99.0] * 50,  # now and then
        [101.0] * 200,
    ],
)
def test_few_codes_now_and_then_are_not(found):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report(found)
