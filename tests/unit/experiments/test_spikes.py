"""Criteria of the findings on loss spikes: each can hold and can fail."""

import pytest

from limner.evaluation.confidence import Estimate
from limner.experiments import spikes as spikes_module
from limner.experiments.spikes import grows, is_better, patches_predict, pool, trial
from limner.experiments.tiny_models import train_clip
from limner.metrics.spikes import SpikeMatch
from limner.optim.optimizers import AdamWConfig
from limner.optim.schedules import Cosine


@pytest.mark.parametrize(
    ("counts", "should_grow"),
    [
        ((0, 1, 4), True),
        ((1, 1, 4), True),
        ((2, 2, 2), False),
        ((1, 3, 2), False),
        ((4, 1, 0), False),
        ((0, 0, 0), None),
        ((0, 1, 3), None),  # too few to tell
    ],
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
    ("stable", "adamw", "gains", "holds"),
    [
        (1, 9, [0.03, 0.05], True),
        (1, 9, [0.03, 0.01], None),  # not sure
        (1, 9, [0.03, -0.05], False),  # less accurate
        (9, 9, [0.03], False),  # no fewer spikes
        (0, 0, [0.03], None),  # nothing to remove
        (0, 4, [0.03], None),  # too few
        (4, 4, [-0.03], None),
    ],
)
def test_stable_adamw_must_have_fewer_spikes_and_be_more_accurate(stable, adamw, gains, holds):
    assert is_better(stable, adamw, [Estimate(value=x, low=x - 0.02, high=x + 0.02) for x in gains]) is holds


def test_trials_have_the_papers_set_up(monkeypatch):
    """Patch dropout, a norm after the patch embedding, warm-up for a quarter, cosine, eps 1e-6 (§3.2, App. F.2)."""
    states = []

    def train(**settings):
        run, losses = train_clip(**settings)
        states.append(run)
        return run, losses

    monkeypatch.setattr(spikes_module, "train_clip", train)
    result = trial(lr=2e-3, beta2=0.99, width=8, depth=2, batch=8, steps=8, count=64, seed=0)
    config, model = states[0].config, states[0].model.config
    assert (model.patch_dropout, model.ln_pre, model.sinusoids) == (0.5, True, False)
    assert config.optimizer == AdamWConfig(lr=2e-3, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.2)
    assert (config.warmup_steps, config.schedule, config.clip_norm) == (2, Cosine(), None)
    assert {name: len(values) for name, values in result["rms"].items()} == {"patch embedding": 8, "middle layer": 8}
    assert len(result["loss"]) == 8 and 0 <= result["accuracy"] <= 1
