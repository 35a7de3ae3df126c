"""Strengths of models against a general optimizer and closed forms, and agreement against published examples."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.optimize import minimize

from limner.metrics.preferences import EQUAL, fit_strengths, krippendorff_alpha


def loss(parameters: np.ndarray, pairs: np.ndarray, outcomes: np.ndarray) -> float:
    """Return the negative log-posterior, one comparison at a time."""
    *strengths, tie = parameters
    total = 0.005 * float(np.square(parameters).sum())
    for (i, j), outcome in zip(pairs, outcomes, strict=True):
        weights = np.exp([strengths[i], strengths[j], tie + (strengths[i] + strengths[j]) / 2])
        total -= float(np.log(weights[outcome] / weights.sum()))
    return total


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), models=st.integers(2, 5))
def test_strengths_are_those_of_a_general_optimizer(seed, models):
    rng = np.random.default_rng(seed)
    pairs = np.array([rng.permutation(models)[:2] for _ in range(40)])
    outcomes = rng.integers(3, size=40)
    fitted = fit_strengths(pairs, outcomes, models)
    best = minimize(loss, np.zeros(models + 1), (pairs, outcomes), method="BFGS", options={"gtol": 1e-7}).x
    np.testing.assert_allclose(fitted.values, best[:-1] - best[:-1].mean(), atol=1e-4)
    assert fitted.tie == pytest.approx(best[-1], abs=1e-4)


def test_strengths_of_two_models_follow_the_counts():
    wins, losses, ties = 4_000, 1_000, 2_000
    outcomes = np.repeat([0, 1, EQUAL], [wins, losses, ties])
    values, errors, tie = fit_strengths(np.tile([0, 1], (len(outcomes), 1)), outcomes, 2)
    assert values[0] - values[1] == pytest.approx(np.log(wins / losses), abs=1e-3)
    assert tie == pytest.approx(np.log(ties / np.sqrt(wins * losses)), abs=1e-3)
    assert errors[0] == pytest.approx(errors[1]) and 0.01 < errors[0] < 0.03


def test_a_model_that_wins_every_vote_has_a_finite_strength():
    values, errors, _ = fit_strengths(np.array([[0, 1]] * 50), np.zeros(50, int), 2)
    assert values[0] > 1 and np.isfinite(values).all() and np.isfinite(errors).all()


def test_intervals_cover_the_strengths_that_voters_follow():
    rng, true, covered = np.random.default_rng(0), np.array([0.7, 0.0, -0.7]), 0
    for _ in range(100):
        pairs = np.array([rng.permutation(3)[:2] for _ in range(300)])
        a, b = true[pairs[:, 0]], true[pairs[:, 1]]
        weights = np.exp(np.stack([a, b, (a + b) / 2], 1))
        outcomes = (rng.random(300)[:, None] > (weights / weights.sum(1, keepdims=True)).cumsum(1)).sum(1)
        values, errors, _ = fit_strengths(pairs, outcomes, 3)
        covered += int((abs(values - true) < 1.96 * errors).sum())
    assert 0.91 < covered / 300 < 0.99


@pytest.mark.parametrize(
    ("raters", "expected"),
    [  # Krippendorff 2011, examples A, B and C
        (["0100000010", "1110010000"], 0.095),
        (["aabbdcccedda", "babbbccceddd"], 0.692),
        (["123321412...", "123322412 5.3", ".33323422 51.", "123324412 51."], 0.743),
    ],
)
def test_agreement_of_published_examples(raters, expected):
    columns = zip(*(rater.replace(" ", "") for rater in raters), strict=True)
    units = [[value for value in column if value != "."] for column in columns]
    assert krippendorff_alpha(units) == pytest.approx(expected, abs=5e-4)


def test_agreement_is_one_if_all_agree_and_undefined_without_a_choice():
    assert krippendorff_alpha([["a", "a"], ["b", "b", "b"]]) == 1
    assert np.isnan(krippendorff_alpha([["a", "a"], ["a"]])) and np.isnan(krippendorff_alpha([]))
