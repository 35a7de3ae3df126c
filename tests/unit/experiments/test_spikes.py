"""Criteria of the findings on loss spikes: each can hold and can fail."""

import math

import numpy as np
import pytest
import torch

from limner.experiments.spikes import BRIGHTENING, PATCH, InjectedSignal, grows, is_better, patches_predict, pool
from limner.metrics.spikes import SpikeMatch


@pytest.mark.parametrize(
    ("counts", "should_grow"),
    [((0, 1, 4), True), ((1, 1, 4), True), ((2, 2, 2), False), ((0, 3, 1), False), ((4, 1, 0), False)],
)
def test_spikes_grow_only_where_they_never_fall(counts, should_grow):
    assert grows(counts) is should_grow


def spikes(loss, following, covered=0.05):
    return SpikeMatch(list(range(loss)), [], list(range(following)), covered)


@pytest.mark.parametrize(
    ("patches", "middle", "holds"),
    [
        (spikes(10, 9), spikes(10, 0), True),
        (spikes(10, 9), spikes(10, 8), False),  # a middle layer predicts them as well
        (spikes(10, 4), spikes(10, 0), False),  # beyond chance, but not most of them
        (spikes(10, 9, covered=0.8), spikes(10, 0), False),  # nothing but chance
        (spikes(4, 4), spikes(4, 0), None),  # too few
    ],
)
def test_rms_predicts_spikes_only_beyond_chance_and_in_the_patch_embedding(patches, middle, holds):
    assert patches_predict(patches, middle) is holds


def test_runs_are_pooled():
    pooled = pool([spikes(3, 2, 0.1), spikes(1, 1, 0.3)])
    assert len(pooled.loss) == 4 and len(pooled.following) == 3 and pooled.covered == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("stable", "adamw", "differences", "holds"),
    [
        (1, 9, {"AdamW": (0.03, 0.01), "clipping": (0.05, 0.01)}, True),
        (1, 9, {"AdamW": (0.03, 0.01), "clipping": (0.01, 0.01)}, None),  # not sure
        (1, 9, {"AdamW": (0.03, 0.01), "clipping": (-0.05, 0.01)}, False),  # less accurate
        (9, 9, {"AdamW": (0.03, 0.01)}, False),  # no fewer spikes
        (0, 0, {"AdamW": (0.03, 0.01)}, None),  # nothing to remove
        (1, 9, {"AdamW": (0.03, math.inf)}, None),  # one seed
    ],
)
def test_stable_adamw_must_have_fewer_spikes_and_be_more_accurate(stable, adamw, differences, holds):
    assert is_better(stable, adamw, differences) is holds


def test_the_signal_brightens_half_of_the_blue_pixels_at_a_time():
    signal = InjectedSignal(400, seed=1)
    pictures = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (4, 3, 24, 24), dtype=np.uint8))
    first, second = signal.onsets
    assert 200 <= first < second < 360
    for step, share in ((first - 1, 0.0), (first, 0.5), (second - 1, 0.5), (second, 1.0)):
        changed = signal.change(step, pictures)
        assert changed[:, :2].equal(pictures[:, :2])
        brighter = changed[:, 2] >= 127 + BRIGHTENING
        assert brighter.float().mean() == share
        assert set(changed[:, 2].unique().tolist()) <= {127, 128, 127 + BRIGHTENING, 128 + BRIGHTENING}
        assert brighter[:, :PATCH].equal(brighter[:, PATCH : 2 * PATCH])
