"""Freezing: rules by hand, what a frozen part saves, and states that survive."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from limner.data.stream import Stream
from limner.errors import UserError
from limner.numerics.precision import Fp32
from limner.objectives.autoregressive import Autoregressive
from limner.optim.optimizers import AdamWConfig
from limner.training.config import TrainConfig
from limner.training.freezing import Freezing
from limner.training.freezing_rules import (
    FreezingRule,
    GradientNormFreezing,
    GuardedFreezing,
    PercentileFreezing,
    ScheduledFreezing,
    WindowStatistics,
)
from limner.training.loop import train
from limner.training.metrics_log import read_metrics
from limner.training.parallel import Parallel, SingleProcess
from limner.training.train_state import TrainState
from numbered_tokens import PRIOR, numbered_tokens

CONFIG = TrainConfig(
    steps=12, batch_size=4, warmup_steps=2, optimizer=AdamWConfig(lr=1e-2), precision=Fp32(), log_every=1,
    checkpoint_every=5,
)  # fmt: skip


def state(config=CONFIG, model=None, parallel=None):
    torch.manual_seed(0)
    return TrainState(model or PRIOR.build(), Autoregressive(), config, parallel=parallel)


def score(metrics):
    return metrics["loss"]


def go(out, rule, config=CONFIG, every=2, evaluate=None, more=lambda run, freezing: ()):
    run = state(config)
    freezing = Freezing(run, rule, every, score)
    train(run, Stream(numbered_tokens(10), 4), out, evaluate=evaluate, hooks=[freezing, *more(run, freezing)])
    return run, freezing


# ---------------------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("level", "norms", "expected"),
    [
        (0.0, [4, 3, 1, 2, 5], 1.0),  # alpha (L - 0) = 1 is less than argmin 2
        (1.0, [0, 3, 1, 2, 5], 1.75),
        (1.75, [0, 1, 2, 3, 5], 1.0),  # the smallest is block 1, which is the first that trains
        (2.0, [0, 0, 4, 4, 1], 2.5),  # the head is layer 4
        (3.9, [0, 0, 0, 2, 1], 3.925),
    ],
)
def test_the_rule_of_the_paper(level, norms, expected):
    rule = GradientNormFreezing(alpha=0.25)
    assert rule.decide(WindowStatistics(progress=0, level=level, norms=norms))[0] == pytest.approx(expected)


def test_a_small_alpha_freezes_in_the_end():
    rule, level = GradientNormFreezing(alpha=0.05), 0.0
    for _ in range(100):
        level, _ = rule.decide(WindowStatistics(progress=0, level=level, norms=[9, 9, 9, 9, 1]))
    assert int(level) == 3


def test_the_percentile_rule():
    rule = PercentileFreezing(percentile=50)
    previous = [10.0, 10, 10, 10, 10]
    assert rule.decide(WindowStatistics(progress=0, level=0, norms=[1, 1, 1, 1, 1]))[0] == 0  # nothing to compare with
    window = WindowStatistics(
        progress=0, level=0, norms=[9.9, 10.2, 5, 6, 1], previous=previous
    )  # changes 1, 2, 50, 40%
    assert rule.decide(window)[0] == 2
    assert rule.decide(replace(window, norms=[5, 10.2, 9.9, 6, 1]))[0] == 0
    assert rule.decide(replace(window, level=1.0, norms=[0, 10, 5, 6, 1]))[0] == 2
    assert rule.decide(replace(window, norms=previous))[0] == 0  # all changes are equal


def test_the_schedule():
    rule = ScheduledFreezing(share=0.5, start=0.2, end=0.6)
    levels = [rule.decide(WindowStatistics(progress=p, level=0, norms=[1] * 5))[0] for p in (0.1, 0.2, 0.4, 0.6, 0.9)]
    assert [int(level) for level in levels] == [0, 0, 1, 2, 2]
    rule = ScheduledFreezing(share=2 / 3, start=0, end=0)
    assert [int(rule.decide(WindowStatistics(progress=0, level=0, norms=[1] * (n + 1)))[0]) for n in (3, 6, 12)] == [
        2,
        4,
        8,
    ]
    with pytest.raises(ValueError, match="end must be at least start"):
        ScheduledFreezing(start=0.5, end=0.2)


def test_the_guarded_rule():
    rule = GuardedFreezing(max_update=0.01, min_fall=0.1)
    window = WindowStatistics(
        progress=0, level=1, norms=[0, 1, 2, 3, 4], previous=[0, 1, 2, 3, 4], updates=[0, 0.001, 0.02, 0.001]
    )
    level, reason = rule.decide(window)
    assert level == 2
    assert reason == "the weights of block 2 changed by 0.02"
    level, reason = rule.decide(replace(window, norms=[0, 0.8, 2, 3, 4]))
    assert level == 1
    assert reason == "the gradient norm of block 1 fell by 20%"
    assert rule.decide(replace(window, updates=[0.001] * 4))[0] == 3  # the last block never freezes
    assert rule.decide(replace(window, previous=[]))[0] == 1
    assert not rule.unfreezes(1.01, 1.0)
    assert rule.unfreezes(1.03, 1.0)
    assert not rule.unfreezes(1.0, math.inf)


# ---------------------------------------------------------------------------- the hook


def test_blocks_freeze_after_the_warm_up_and_stay_as_they_are(tmp_path):
    seen = []

    class Watch(Freezing):
        def after_backward(self, run):
            super().after_backward(run)
            layers = [list(layer.values()) for layer in self.layers()]
            has = [all(p.grad is not None for p in layer) for layer in layers]
            none = [all(p.grad is None for p in layer) for layer in layers]
            assert has == [not n for n in none]
            seen.append((run.step, none.index(False), [p.detach().clone() for layer in layers[:2] for p in layer]))

    run = state()
    hook = Watch(run, ScheduledFreezing(share=0.5, start=0, end=0), 3, score)
    train(run, Stream(numbered_tokens(10), 4), tmp_path, hooks=[hook])
    assert [depth for _, depth, _ in seen] == [0] * 5 + [2] * 7  # 2 of warm-up and 3 of the first window
    assert all(torch.equal(a, b) for a, b in zip(seen[5][2], seen[-1][2], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(seen[4][2], seen[5][2], strict=True))
    assert all(p.requires_grad for p in run.model.parameters())
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["frozen"] for row in rows] == [0] * 4 + [2] * 8
    assert [row["freezing"] for row in rows if "freezing" in row] == [
        [{"step": step, "frozen": 2, "reason": "schedule at 100%"}] for step in (5, 8, 11)
    ]


def test_norms_are_those_of_the_layers():
    run = state(replace(CONFIG, warmup_steps=0))
    hook = Freezing(run, GradientNormFreezing(), 2, score)
    torch.manual_seed(1)
    for p in run.model.parameters():
        p.grad = torch.randn_like(p)
    hook.after_backward(run)
    expected = [
        torch.cat([p.grad.flatten() for name, p in run.model.named_parameters() if name.startswith(prefix)]).norm()
        for prefix in (("embed.", "blocks.0."), "blocks.1.", "blocks.2.", "blocks.3.", "head.")
    ]
    assert hook.latest == pytest.approx([float(x) for x in expected])


def test_a_skipped_update_does_not_count():
    run = state(replace(CONFIG, warmup_steps=0))
    hook = Freezing(run, GradientNormFreezing(), 2, score)
    for run.step, run.norm in ((1, 1.0), (2, math.nan), (3, 2.0)):
        run.loss, hook.latest = 1.0, [run.norm] * 5
        hook.after_update(run)
        hook.decisions.clear()
    assert hook.sums == [2.0] * 5  # the window of steps 1 and 2 has ended
    assert hook.previous == [1.0] * 5


def test_a_worse_evaluation_unfreezes_the_last_frozen_block(tmp_path):
    scores = iter([1.0, 1.0, 2.0, 2.0, 0.5, 0.5])
    config = replace(CONFIG, eval_every=2)

    class Always(GuardedFreezing):
        def decide(self, window):
            return (window.level, "later") if not window.previous else (3, "always")

    run, _ = go(tmp_path, Always(), config, evaluate=lambda model, step: {"loss": next(scores)})
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["frozen"] for row in rows][2:] == [0, 0, 0, 3, 2, 2, 1, 1, 1, 3]
    reasons = [entry["reason"] for row in rows for entry in row.get("freezing", [])]
    assert reasons.count("the score rose from 1 to 2") == 2
    assert run.step == 12


@pytest.mark.parametrize("rule", [GradientNormFreezing(alpha=0.3), GuardedFreezing(max_update=10, min_fall=0.9)])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, rule):
    evaluate = {"evaluate": lambda model, step: {"loss": 1.0}}
    whole, _ = go(tmp_path / "whole", rule, **evaluate)
    for steps in (5, 8, 12):
        resumed, freezing = go(tmp_path / "parts", rule, replace(CONFIG, steps=steps), **evaluate)
    assert freezing.depth > 0
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    rows = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts")]
    keys = ("loss", "frozen", "freezing", "grad_norm")
    assert [[row.get(k) for k in keys] for row in rows[0]] == [[row.get(k) for k in keys] for row in rows[1]]


def test_a_model_without_blocks_and_processes_that_cannot_freeze_are_refused():
    with pytest.raises(UserError, match="a Linear cannot be frozen block by block"):
        Freezing(state(model=nn.Linear(2, 2)), FreezingRule(), 2, score)

    class Others(SingleProcess):
        freeze = Parallel.freeze

    with pytest.raises(UserError, match="choose --parallel pipeline, or start without torchrun"):
        Freezing(state(parallel=Others()), FreezingRule(), 2, score)
