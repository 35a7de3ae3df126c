"""A collapsed codebook is said aloud; a batch with few codes is not a collapse."""

import warnings

import pytest

from limner.runs.stages import CollapseWarning


def report(found: list[float], vocab: int = 1_000) -> None:
    watching = CollapseWarning(vocab)
    for i, codes in enumerate(found):
        watching.on_step(10 * i, {"codes": codes})


def test_few_codes_for_long_are_a_collapse_and_said_once():
    with pytest.warns(UserWarning, match="99 of 1000 codes") as said:
        report([99.0] * 200)
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
