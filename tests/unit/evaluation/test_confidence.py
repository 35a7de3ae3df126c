"""Intervals hold what they promise where cases are alike, and are Wilson's where they are not."""

import numpy as np
import pytest
from scipy.stats import binomtest, t

from limner.evaluation.confidence import Gain, Rate, student, wilson


@pytest.mark.parametrize(("right", "total"), [(0, 9), (9, 9), (43, 50), (1, 300)])
def test_the_interval_is_wilsons(right, total):
    expected = binomtest(right, total).proportion_ci(method="wilson")
    assert wilson(right / total, total) == pytest.approx((expected.low, expected.high), abs=1e-4)
    unrelated = Rate.of(np.arange(total) < right, [str(i) for i in range(total)])
    assert (unrelated.right, unrelated.total) == (right, total)
    assert unrelated.high - unrelated.low == pytest.approx(expected.high - expected.low, rel=0.2)


def test_students_percentile():
    for degrees in (*range(4, 40), 1_000):
        assert student(degrees) == pytest.approx(t.ppf(0.975, degrees), rel=0.01)


def clustered(rng, n=1_024, clusters=30, a=8.0, b=1.0):
    """Verdicts of captions, each of one of some combinations that are not equally hard, their combinations."""
    hard = rng.beta(a, b, clusters)
    which = rng.integers(clusters, size=n)
    return rng.random(n) < hard[which], [f"c{k}" for k in which]


@pytest.mark.parametrize(("n", "a", "b"), [(1_024, 8, 1), (1_024, 1, 8), (1_024, 2, 2), (64, 8, 2), (300, 50, 50)])
def test_nineteen_of_twenty_intervals_hold_the_share_over_all_clusters(n, a, b):
    rng, held, naive = np.random.default_rng(n + a), 0, 0
    for _ in range(400):
        verdicts, clusters = clustered(rng, n, a=a, b=b)
        rate = Rate.of(verdicts, clusters)
        held += rate.low <= a / (a + b) <= rate.high
        low, high = wilson(rate.value, n)
        naive += low <= a / (a + b) <= high
    assert held >= 0.91 * 400
    assert naive < 0.87 * 400 or n < 1_024  # what counts captions as unrelated promises too much


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_at_none_and_all_the_interval_is_not_empty(value):
    rate = Rate.of(np.full(64, value), [f"c{i % 27}" for i in range(64)])
    assert rate.low <= value <= rate.high
    assert 0.03 < rate.high - rate.low < 0.1
    one = Rate.of(np.full(64, value), ["c"] * 64)
    assert one.high - one.low > 0.7  # a single combination says next to nothing of others
    assert 0 < Rate.of(np.array([value]), ["c"]).high <= 1


def test_a_gain_is_taken_case_by_case():
    rng = np.random.default_rng(0)
    others, clusters = clustered(rng)
    values = others.copy()
    values[rng.permutation(np.flatnonzero(~others))[:30]] = True
    gain = Gain.of(values, others, clusters)
    assert gain.value == pytest.approx(30 / 1_024)
    assert 0 < gain.low < gain.value < gain.high < 0.06  # though the two shares' own intervals overlap
    assert Rate.of(values, clusters).low < Rate.of(others, clusters).high
    assert str(gain).endswith("better") and str(Gain.of(others, values, clusters)).endswith("worse")
    same = Gain.of(others, others, clusters)
    assert same.low < 0 == same.value < same.high < 0.01
    assert str(same).endswith("not told apart")


@pytest.mark.parametrize("each", [(1, 1), (1, 0), (1, 0, 0)])
def test_a_gain_that_is_the_same_in_each_of_few_clusters_is_not_exact(each):
    values, clusters = np.array(each * 2, float), ["a"] * len(each) + ["b"] * len(each)
    gain = Gain.of(values, np.zeros(len(values)), clusters)
    assert gain.value == pytest.approx(np.mean(each))
    assert gain.value - gain.low > 0.3
    assert gain.high == 1.0 or gain.high - gain.value > 0.3


def test_gains_hold_what_they_promise():
    rng, held = np.random.default_rng(1), 0
    for _ in range(300):
        shift = rng.normal(0.03, 0.05, 30)
        which = rng.integers(30, size=1_024)
        differences = np.sign(shift[which]) * (rng.random(1_024) < abs(shift[which]))
        gain = Gain.of(differences.clip(0), (-differences).clip(0), [str(k) for k in which])
        held += gain.low <= 0.03 <= gain.high
    assert held >= 0.91 * 300


def test_verdicts_without_clusters_are_refused():
    for values, clusters in (([], []), ([1.0], []), ([1.0], ["a", "b"])):
        with pytest.raises(ValueError):
            Rate.of(np.array(values), clusters)
