"""Intervals have their nominal coverage for clustered cases and equal Wilson's for independent ones."""

import numpy as np
import pytest
from scipy.stats import binomtest, t

from limner.evaluation.confidence import mean, paired_difference, proportion, t_quantile, wilson


@pytest.mark.parametrize(("right", "total"), [(0, 9), (9, 9), (43, 50), (1, 300)])
def test_the_interval_is_wilsons(right, total):
    expected = binomtest(right, total).proportion_ci(method="wilson")
    assert wilson(right / total, total) == pytest.approx((expected.low, expected.high), abs=1e-4)
    independent = proportion(np.arange(total) < right, [str(i) for i in range(total)])
    assert (independent.right, independent.total) == (right, total)
    assert independent.high - independent.low == pytest.approx(expected.high - expected.low, rel=0.2)


def test_t_quantile_matches_scipy():
    for degrees in (*range(1, 40), 1_000):
        assert t_quantile(degrees) == pytest.approx(t.ppf(0.975, degrees), rel=0.01)


def test_95_percent_of_intervals_of_few_values_cover_the_mean():
    for n, rng in ((2, np.random.default_rng(2)), (3, np.random.default_rng(3)), (5, np.random.default_rng(5))):
        found = [mean(rng.normal(1, 3, n), "") for _ in range(1_000)]
        assert 0.93 < np.mean([x.low <= 1 <= x.high for x in found]) < 0.97
    assert str(mean(np.array([1.5]), "dB")) == "1.50 dB"  # one value lacks an interval


def clustered(rng, n=1_024, clusters=30, a=8.0, b=1.0):
    """Verdicts on captions whose combinations differ in difficulty, and the combinations."""
    accuracy = rng.beta(a, b, clusters)
    index = rng.integers(clusters, size=n)
    return rng.random(n) < accuracy[index], [f"c{k}" for k in index]


@pytest.mark.parametrize(("n", "a", "b"), [(1_024, 8, 1), (1_024, 1, 8), (1_024, 2, 2), (64, 8, 2), (300, 50, 50)])
def test_95_percent_of_intervals_cover_the_mean_over_all_clusters(n, a, b):
    rng, covered, naive = np.random.default_rng(n + a), 0, 0
    for _ in range(400):
        verdicts, clusters = clustered(rng, n, a=a, b=b)
        rate = proportion(verdicts, clusters)
        covered += rate.low <= a / (a + b) <= rate.high
        low, high = wilson(rate.value, n)
        naive += low <= a / (a + b) <= high
    assert covered >= 0.91 * 400
    assert naive < 0.87 * 400 or n < 1_024  # an interval for independent captions is too narrow


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_the_interval_is_not_empty_at_0_and_1(value):
    rate = proportion(np.full(64, value), [f"c{i % 27}" for i in range(64)])
    assert rate.low <= value <= rate.high
    assert 0.03 < rate.high - rate.low < 0.1
    single = proportion(np.full(64, value), ["c"] * 64)
    assert single.high - single.low > 0.7  # a single cluster hardly constrains the mean
    assert 0 < proportion(np.array([value]), ["c"]).high <= 1


def test_a_difference_is_paired():
    rng = np.random.default_rng(0)
    baseline, clusters = clustered(rng)
    values = baseline.copy()
    values[rng.permutation(np.flatnonzero(~baseline))[:30]] = True
    gain = paired_difference(values, baseline, clusters)
    assert gain.value == pytest.approx(30 / 1_024)
    assert 0 < gain.low < gain.value < gain.high < 0.06  # although the two separate intervals overlap
    assert proportion(values, clusters).low < proportion(baseline, clusters).high
    assert str(gain).endswith("better") and str(paired_difference(baseline, values, clusters)).endswith("worse")
    same = paired_difference(baseline, baseline, clusters)
    assert same.low < 0 == same.value < same.high < 0.01
    assert str(same).endswith("not significant")


@pytest.mark.parametrize("each", [(1, 1), (1, 0), (1, 0, 0)])
def test_equal_differences_in_few_clusters_keep_a_wide_interval(each):
    values, clusters = np.array(each * 2, float), ["a"] * len(each) + ["b"] * len(each)
    gain = paired_difference(values, np.zeros(len(values)), clusters)
    assert gain.value == pytest.approx(np.mean(each))
    assert gain.value - gain.low > 0.3
    assert gain.high == 1.0 or gain.high - gain.value > 0.3


def test_95_percent_of_difference_intervals_cover_the_mean():
    rng, covered = np.random.default_rng(1), 0
    for _ in range(300):
        shift = rng.normal(0.03, 0.05, 30)
        index = rng.integers(30, size=1_024)
        differences = np.sign(shift[index]) * (rng.random(1_024) < abs(shift[index]))
        gain = paired_difference(differences.clip(0), (-differences).clip(0), [str(k) for k in index])
        covered += gain.low <= 0.03 <= gain.high
    assert covered >= 0.91 * 300


def test_values_without_clusters_raise():
    for values, clusters in (([], []), ([1.0], []), ([1.0], ["a", "b"])):
        with pytest.raises(ValueError):
            proportion(np.array(values), clusters)
