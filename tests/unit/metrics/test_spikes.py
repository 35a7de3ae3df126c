"""Spikes are found at their first step, counted once, and distinguished from coincidence."""

import math

import numpy as np
import pytest
from scipy.stats import binom

from limner.metrics.spikes import RMS_SPIKE, SpikeMatch, loss_spikes, match_spikes, rms_spikes


def falling(n=4_000, seed=0):
    """A falling, noisy loss."""
    return 4 * np.exp(-np.arange(n) / 2_000) + 0.05 * np.random.default_rng(seed).standard_normal(n)


def test_a_smooth_loss_has_no_spikes():
    assert [len(loss_spikes(falling(seed=seed))) for seed in range(5)] == [0] * 5


def test_spikes_of_several_steps_are_found_once_and_at_their_first_step():
    loss = falling()
    for step in (1_000, 1_500, 3_000):
        loss[step - 1 : step + 3] += 1
    assert loss_spikes(loss) == [1_000, 1_500, 3_000]


def test_single_steps_and_the_first_ones_do_not_count():
    loss = falling()  # 200 of 4,000 steps are ignored, the same share as 1,000 of the paper's 20,000
    loss[2_000] += 1
    loss[149:153] += 2
    assert loss_spikes(loss) == []
    loss[219:223] += 1
    assert loss_spikes(loss) == [220]


def test_a_long_spike_does_not_hide_a_later_one():
    loss = falling()
    loss[1_999:2_030] += 1
    loss[2_099:2_104] += 1
    assert loss_spikes(loss) == [2_000, 2_100]


def test_a_new_level_is_one_spike():
    loss = falling()
    loss[1_999:] += 1
    loss[2_999:3_003] += 1
    assert loss_spikes(loss) == [2_000, 3_000]


def test_losses_that_are_not_finite_are_too_high():
    loss = falling()
    loss[999:1_002] = [math.inf, math.nan, math.inf]
    assert loss_spikes(loss) == [1_000]


def test_rms_spikes_are_merged():
    rms = np.ones(2_000)
    rms[[49, 499, 503, 510, 530]] = RMS_SPIKE
    rms[1_000] = RMS_SPIKE - 0.01
    assert rms_spikes(rms) == [500, 511, 531]
    rms[1_100:1_200:9] = rms[1_300:1_350] = RMS_SPIKE  # repeated spikes, and one long spike
    assert rms_spikes(rms) == [500, 511, 531, *range(1_101, 1_200, 18), 1_301]


def test_following_spikes_are_distinguished_from_coincidence():
    loss, rms = falling(), np.ones(4_000)
    for step in (1_000, 1_500, 3_000):
        rms[step - 1] = 5
        loss[step + 4 : step + 9] += 1  # the fifth to ninth step after
    loss[2_499:2_504] += 1
    match = match_spikes(loss, rms)
    assert match.loss == [1_005, 1_505, 2_500, 3_005] and match.following == [1_005, 1_505, 3_005]
    assert match.covered == pytest.approx(3 * 8 / 4_000)
    p = match.covered
    assert match.p_value == pytest.approx(4 * p**3 * (1 - p) + p**4)
    late = np.roll(rms, 20)
    assert match_spikes(loss, late).following == [] and match_spikes(loss, late).p_value == pytest.approx(1)
    assert match_spikes(falling(), np.ones(4_000)).p_value == 1  # no spikes


def test_p_value_of_thousands_of_spikes_is_a_probability():
    steps = list(range(5_000))
    for following, covered in ((1_050, 0.2), (1_000, 0.2), (0, 0.2), (1, 0.0), (0, 0.0), (5_000, 1.0)):
        match = SpikeMatch(steps, steps, steps[:following], covered)
        assert match.p_value == pytest.approx(binom.sf(following - 1, 5_000, covered), rel=1e-6)


def test_a_shorter_window_sees_spikes_of_a_loss_that_falls_fast():
    loss = 4 * np.exp(-np.arange(400) / 50) + 0.01 * np.random.default_rng(0).standard_normal(400)
    loss[149:153] += 0.5
    assert loss_spikes(loss) == [] and loss_spikes(loss, 20) == [150]
