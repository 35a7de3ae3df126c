"""A cached run has the losses of one that computes everything, with a full, an empty and a damaged cache."""

import shutil
from dataclasses import replace

import pytest
import torch
from torch import nn

from limner.data.stream import Stream
from limner.errors import UserError
from limner.numerics.precision import Bf16, Fp32
from limner.objectives.autoregressive import Autoregressive
from limner.optim.optimizers import AdamWConfig
from limner.training import auto_cache
from limner.training.auto_cache import AutoCache
from limner.training.config import TrainConfig
from limner.training.freezing import Freezing
from limner.training.freezing_rules import FreezingRule
from limner.training.hooks import Hook
from limner.training.loop import train
from limner.training.metrics_log import read_metrics
from limner.training.train_state import TrainState
from numbered_tokens import PRIOR, numbered_tokens

CONFIG = TrainConfig(
    steps=12, batch_size=4, warmup_steps=1, optimizer=AdamWConfig(lr=1e-2), precision=Fp32(), log_every=1,
    checkpoint_every=5,
)  # fmt: skip
DEPTHS = {3: 1, 6: 3}


class Stairs(FreezingRule):
    """Freeze DEPTHS[step] blocks after the update `step`, with one decision for each update."""

    def decide(self, window):
        step = round(window.progress * (CONFIG.steps - CONFIG.warmup_steps)) + CONFIG.warmup_steps
        return max((depth for at, depth in DEPTHS.items() if step >= at), default=0), f"after step {step}"


class Until(Hook):
    """Ends a run after some updates."""

    def __init__(self, step):
        self.step, self.done_steps = step, 0

    @property
    def done(self):
        return self.done_steps >= self.step

    def before_step(self, run):
        self.done_steps = run.step + 1


def go(out, cached=True, config=CONFIG, seed=0, folder=None, steps=CONFIG.steps):
    torch.manual_seed(seed)
    run = TrainState(PRIOR.build(), Autoregressive(), config)
    data = numbered_tokens(6)
    hooks = [Freezing(run, Stairs(), 1, lambda metrics: 0.0)]
    if cached:
        hooks.append(AutoCache(run, hooks[0], folder or out / "cache", 1 << 20, [data]))
    train(run, Stream(data, 4), out, hooks=[*hooks, Until(steps)])
    return run, read_metrics(out / "metrics.jsonl")


def losses(rows):
    return [row["loss"] for row in rows]


@pytest.fixture(autouse=True)
def reading_is_faster(monkeypatch):
    monkeypatch.setattr(auto_cache, "_fastest", lambda work: work() is not None and next(times))
    times = iter([1.0, 2.0] * 100)


@pytest.mark.parametrize("precision", [Fp32(), Bf16()])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_losses_and_weights_are_those_of_the_run_without_a_cache(tmp_path, precision, accumulate):
    config = replace(CONFIG, precision=precision, accumulate=accumulate)
    (a, cached), (b, plain) = go(tmp_path / "a", config=config), go(tmp_path / "b", cached=False, config=config)
    assert losses(cached) == pytest.approx(losses(plain), abs=1e-6)
    for x, y in zip(a.model.parameters(), b.model.parameters(), strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=0)
    assert [row["frozen"] for row in cached] == [0, 0, 1, 1, 1, *[3] * 7]


def test_all_samples_of_a_second_epoch_are_read(tmp_path):
    _, rows = go(tmp_path)
    hits = [row.get("cache/hits") for row in rows]
    assert hits[:3] == [None] * 3
    assert hits[-4:] == [1.0] * 4  # 6 samples in batches of 4
    assert hits[6] < 1
    assert isinstance(Autoregressive(), type(TrainState(PRIOR.build(), Autoregressive(), CONFIG).trainable.objective))


def test_a_deeper_record_is_computed_from_the_old_one(tmp_path, monkeypatch):
    calls, run = [], auto_cache.AutoCache._compute
    monkeypatch.setattr(AutoCache, "_compute", lambda self, *a: calls.append(self.depth) or run(self, *a))
    go(tmp_path)
    assert calls.count(1) == 2 + 5  # one sample is timed, the other five are computed
    assert calls.count(3) == 2  # only the timing computes from the tokens


def test_a_process_that_had_no_frozen_blocks_before_reads_the_records_of_another(tmp_path, monkeypatch):
    """Replicas of a shorter pipeline get the frozen blocks of a process that has already cached a part of them."""
    torch.manual_seed(0)
    model, data = PRIOR.build(), numbered_tokens(6)
    runs = [TrainState(model, Autoregressive(), CONFIG) for _ in range(2)]
    run, freezing = runs[0], Freezing(runs[0], Stairs(), 1, lambda metrics: 0.0)
    caches = [AutoCache(each, freezing, tmp_path, 1 << 20, [data]) for each in runs]
    batch = data.batch(torch.arange(6).numpy(), torch.arange(6).numpy())
    freezing.level = 1.0
    for cache in caches:
        cache.before_step(run)
    caches[0].activations(run.model, batch)
    freezing.level = 3.0
    calls, compute = [], auto_cache.AutoCache._compute
    monkeypatch.setattr(AutoCache, "_compute", lambda self, *a: calls.append(self) or compute(self, *a))
    for cache in caches:
        cache.before_step(run)
    deeper = caches[1].activations(run.model, batch)
    assert calls == [caches[1]] * 2  # timing one sample
    expected = run.model.run(run.model.inputs(batch["text"], batch["image"]), 0, 3)
    assert torch.allclose(deeper, expected, atol=1e-6)
    assert torch.equal(caches[0].activations(run.model, batch), deeper) and caches[0].hits == 1 + 6


@pytest.mark.parametrize("keep", [True, False])
def test_a_resumed_run_is_the_uninterrupted_one_with_and_without_the_file(tmp_path, keep):
    whole, rows = go(tmp_path / "whole")
    for steps in (4, 8, 12):
        resumed, again = go(tmp_path / "parts", steps=steps)
        if not keep:
            shutil.rmtree(tmp_path / "parts" / "cache")
    assert losses(again) == losses(rows)
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_records_of_other_weights_are_not_read(tmp_path):
    go(tmp_path / "first", folder=tmp_path / "cache")
    _, cached = go(tmp_path / "second", seed=1, folder=tmp_path / "cache")
    _, plain = go(tmp_path / "plain", seed=1, cached=False)
    assert losses(cached) == pytest.approx(losses(plain), abs=1e-6)
    assert cached[3]["cache/hits"] < 1


def test_nothing_is_read_if_computing_is_faster_and_losses_stay(tmp_path, monkeypatch):
    _, reading = go(tmp_path / "reading")
    times = iter([2.0, 1.0] * 100)
    monkeypatch.setattr(auto_cache, "_fastest", lambda work: next(times))
    _, rows = go(tmp_path / "computing")
    assert {row["cache/hits"] for row in rows[3:]} == {0.0}
    assert losses(rows) == losses(reading)


def test_a_damaged_cache_changes_nothing(tmp_path):
    _, rows = go(tmp_path / "whole")
    go(tmp_path / "parts", steps=8)
    (file,) = (tmp_path / "parts/cache").iterdir()
    data = bytearray(file.read_bytes())
    data[::97] = bytes(len(data[::97]))
    file.write_bytes(data)
    _, again = go(tmp_path / "parts")
    assert losses(again) == losses(rows)


def test_the_timing_returns_the_fastest(monkeypatch):
    clock = iter([0.0, 3.0, 3.0, 4.0, 4.0, 6.0])
    monkeypatch.undo()
    monkeypatch.setattr(auto_cache.time, "perf_counter", lambda: next(clock))
    assert auto_cache._fastest(lambda: None) == 1.0


def test_dropout_is_refused():
    model = PRIOR.build()
    model.blocks[1].mlp.branch = nn.Sequential(model.blocks[1].mlp.branch, nn.Dropout(0.1))
    run = TrainState(model, Autoregressive(), CONFIG)
    with pytest.raises(UserError, match="dropout gives a sample other activations"):
        AutoCache(run, Freezing(run, Stairs(), 1, len), "cache", 1 << 20, [])


def test_an_objective_that_is_not_in_stages_is_refused():
    run = TrainState(PRIOR.build(), lambda *arguments: None, CONFIG)
    with pytest.raises(UserError, match="does not separate what is before and after the blocks"):
        AutoCache(run, Freezing(run, Stairs(), 1, len), "cache", 1 << 20, [])


def test_activations_of_another_format_are_refused(tmp_path):
    model = PRIOR.build().double()
    run = TrainState(model, Autoregressive(), CONFIG)
    freezing = Freezing(run, Stairs(), 1, len)
    freezing.level = 2.0
    hook = AutoCache(run, freezing, tmp_path, 1 << 20, [])
    hook.before_step(run)
    batch = numbered_tokens(6).batch(*[torch.arange(2).numpy()] * 2)
    with pytest.raises(UserError, match=r"cached in fp32, but this precision has torch\.float64"):
        run.trainable(batch, 0, run.generator)
