"""The loop against a textbook one, and each of its promises on a model of a few numbers."""

import copy
import json
import math
import os
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from checkpoints import read_tensors
from limner.atomic_io import exclusive_lock, file_hash
from limner.data.stream import Stream
from limner.errors import UserError
from limner.models.dvae import DVAE, DVAEConfig
from limner.numerics.precision import Auto, Bf16, Fp32
from limner.objectives.codebook_elbo import BalancedELB
from limner.optim.optimizers import (
    AdamW16Config,
    AdamWConfig,
    Beta2WarmupAdamWConfig,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    StableAdamWConfig,
)
from limner.optim.schedules import Constant, Cosine, Plateau
from limner.progress import Progress
from limner.training.checkpoint import completed, latest, load_weights
from limner.training.config import TrainConfig
from limner.training.hooks import Hook
from limner.training.loop import Interrupted, train
from limner.training.metrics_log import read_metrics
from limner.training.parallel import SingleProcess
from limner.training.train_state import TrainState


class Points:
    """Random points; the target is the sum of their coordinates."""

    def __len__(self) -> int:
        return 100

    def batch(self, indices: np.ndarray, seeds: np.ndarray) -> dict[str, Tensor]:
        x = np.stack([np.random.default_rng(s).standard_normal(4) + i for i, s in zip(indices % 3, seeds, strict=True)])
        return {"x": torch.from_numpy(x).float()}


def objective(model: nn.Module, batch: dict[str, Tensor], step: int, generator: torch.Generator):
    x = batch["x"]
    error = model(x) - x.sum(1, keepdim=True)
    return error.square().mean(), {"bias": error.detach().mean()}


def noisy(model: nn.Module, batch: dict[str, Tensor], step: int, generator: torch.Generator):
    noise = torch.randn(batch["x"].shape, generator=generator)
    return objective(model, {"x": batch["x"] + 0.1 * noise}, step, generator)


def model(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(dropout), nn.Linear(8, 1))


def stream() -> Stream:
    return Stream(Points(), 12, seed=1)


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(out / "metrics.jsonl")]


CONFIG = TrainConfig(steps=12, batch_size=12, optimizer=AdamWConfig(lr=1e-2), precision=Fp32(), log_every=1)


def test_training_equals_the_textbook_loop(tmp_path: Path) -> None:
    config = replace(CONFIG, warmup_steps=3, cooldown_steps=4, clip_norm=0.5, schedule=Cosine(end=0.1))
    config = replace(config, ema_decay=0.3, ema_every=4)
    ours, theirs, batches = model(), model(), stream()
    averages = [p.detach().clone() for p in theirs.parameters()]
    train(TrainState(ours, objective, config), stream(), tmp_path)
    weights, biases = [[p for p in theirs.parameters() if p.ndim == d] for d in (2, 1)]
    groups = [{"params": weights, "weight_decay": 4.5e-2}, {"params": biases, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.96), fused=True)
    for step in range(12):
        loss, _ = objective(theirs, next(batches), step, torch.Generator())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        factor = 0.1 + 0.9 * (1 + math.cos(math.pi * max(0, step - 3) / 9)) / 2  # 9 updates after the warm-up
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1, (step + 1) / 3, (12 - step) / 4) * factor
        optimizer.step()
        if decay := {3: 2 / 11, 7: 3 / 12, 11: 0.3}.get(step):  # min(0.3, (1 + n) / (10 + n))
            averages = [
                decay * a + (1 - decay) * p.detach() for a, p in zip(averages, theirs.parameters(), strict=True)
            ]
    load_weights(ours, tmp_path, averaged=False)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    load_weights(ours, tmp_path)
    for a, b in zip(ours.parameters(), averages, strict=True):
        torch.testing.assert_close(a.detach(), b)


@pytest.mark.parametrize("accumulate", [2, 5, 12])  # 5 does not divide 12
def test_micro_batches_add_up_to_the_batch(accumulate: int, tmp_path: Path) -> None:
    whole, parts = model(), model()
    train(TrainState(whole, objective, CONFIG), stream(), tmp_path / "whole")
    config = replace(CONFIG, accumulate=accumulate)
    train(TrainState(parts, objective, config), stream(), tmp_path / "parts")
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


FULL = replace(
    CONFIG,
    accumulate=2,
    ema_decay=0.9,
    ema_every=2,
    warmup_steps=4,
    schedule=Plateau(window=2),
    precision=Bf16(),
)


def blocks(dropout: float = 0.0) -> nn.Sequential:
    """The same model, its last layer within a list of blocks."""
    layers = model(dropout)
    layers[0].blocks = nn.ModuleList([layers[3]])
    return layers


OPTIMIZERS: list[OptimizerConfig] = [
    AdamWConfig(lr=1e-2), MuonConfig(fallback_adamw=AdamWConfig(lr=1e-2)), AdamW16Config(lr=1e-2),
    StableAdamWConfig(lr=1e-2), Beta2WarmupAdamWConfig(lr=1e-2), LionConfig(lr=1e-3),
]  # fmt: skip


@pytest.mark.parametrize("stops", [[1], [5], [3, 4, 11]])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
def test_a_run_in_parts_is_the_whole_run_bit_for_bit(
    optimizer: OptimizerConfig, stops: list[int], tmp_path: Path
) -> None:
    config, whole, parts = replace(FULL, optimizer=optimizer), blocks(0.2), blocks(0.2)
    train(TrainState(whole, noisy, config), stream(), tmp_path / "whole")
    for steps in (*stops, 12):
        parts = blocks(0.2)
        torch.manual_seed(steps)  # any state of the generator
        train(TrainState(parts, noisy, replace(config, steps=steps)), stream(), tmp_path / "parts")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True))
    finished = train(TrainState(blocks(0.2), noisy, config), stream(), tmp_path / "whole")
    assert finished.step == 12 and finished.metrics["loss"] == losses(tmp_path / "whole")[-1]


def test_a_model_is_brought_back_within_its_bounds_after_each_update(tmp_path: Path) -> None:
    class Bounded(nn.Linear):
        def constrain(self) -> None:
            self.bias.data.fill_(0.25)

    bounded = Bounded(4, 1)
    nn.init.constant_(bounded.bias, 0.25)
    train(
        TrainState(bounded, objective, replace(CONFIG, ema_decay=0.5, optimizer=AdamWConfig(lr=0.5))),
        stream(),
        tmp_path,
    )
    assert bounded.bias.item() == 0.25  # the average of what it was after each update


def test_evaluation_sees_the_average_and_disturbs_nothing(tmp_path: Path) -> None:
    seen = []

    def evaluate(m: nn.Module, step: int) -> dict[str, float]:
        assert not m.training and not torch.is_grad_enabled()
        torch.rand(7)
        seen.append((step, m.get_parameter("0.weight").clone()))
        return {"score": float(step)}

    class Listen(Hook):
        heard: list = []

        def before_log(self, run, row):
            self.heard.append(("step", run.step, "loss" in row))

        def after_eval(self, run, metrics):
            self.heard.append(("eval", run.step, metrics["score"]))

    config, watched = replace(FULL, eval_every=5, log_every=4), model(0.2)
    result = train(TrainState(watched, noisy, config), stream(), tmp_path / "a", evaluate=evaluate, hooks=[Listen()])
    plain = model(0.2)
    train(TrainState(plain, noisy, FULL), stream(), tmp_path / "b")
    assert all(torch.equal(a, b) for a, b in zip(watched.parameters(), plain.parameters(), strict=True))
    assert [step for step, _ in seen] == [5, 10, 12]
    # The model is left with the averaged weights.
    assert torch.equal(seen[-1][1], watched.get_parameter("0.weight"))
    assert result.metrics["eval/score"] == 12
    assert Listen.heard == [
        ("step", 4, True), ("step", 5, True), ("eval", 5, 5.0), ("step", 8, True),
        ("step", 10, True), ("eval", 10, 10.0), ("step", 12, True), ("eval", 12, 12.0),
    ]  # fmt: skip
    again = model(0.2)
    load_weights(again, tmp_path / "a")
    assert torch.equal(again.get_parameter("0.weight"), seen[-1][1])
    load_weights(again, tmp_path / "a", averaged=False)
    assert not torch.equal(again.get_parameter("0.weight"), seen[-1][1])


def breaks(*steps: int, where: str = "loss"):
    def broken(m, batch, step, generator):
        loss, metrics = objective(m, batch, step, generator)
        if step in steps:  # an infinite gradient of a finite loss, or a loss that is not finite
            loss = loss + (m[0].bias.abs() * 0).sqrt().sum() if where == "gradient" else loss * math.nan
        return loss, metrics

    return broken


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_an_update_that_is_not_finite_is_skipped_and_counted(where: str, tmp_path: Path) -> None:
    broken = breaks(3, 4, 8, where=where)
    train(TrainState(model(), broken, replace(CONFIG, steps=6)), stream(), tmp_path)
    result = train(TrainState(model(), broken, CONFIG), stream(), tmp_path)  # continues the count
    assert result.skipped == 3
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["skipped"] for row in rows] == [0, 0, 0, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert all(math.isfinite(rows[i]["loss"]) for i in (0, 5, 11))
    assert (rows[3]["loss"] is None) == (where == "loss")


def test_a_run_that_skipped_all_updates_resumes(tmp_path: Path) -> None:
    """The optimizer's state is empty until its first step."""
    config, broken = replace(CONFIG, max_bad_steps=20), breaks(*range(12), where="gradient")
    train(TrainState(model(), broken, replace(config, steps=6)), stream(), tmp_path)
    result = train(TrainState(model(), broken, config), stream(), tmp_path)
    assert (result.step, result.skipped) == (12, 12)


def test_a_run_that_stays_broken_stops_and_keeps_its_last_good_checkpoint(tmp_path: Path) -> None:
    config = replace(CONFIG, max_bad_steps=3, checkpoint_every=5)
    with pytest.raises(UserError, match=r"after step 9: 3 updates in a row .*lower lr .*step-00000005"):
        train(TrainState(model(), breaks(*range(6, 12)), config), stream(), tmp_path)
    assert [p.name for p in completed(tmp_path)] == ["step-00000005"]
    result = train(TrainState(model(), objective, config), stream(), tmp_path)  # mended
    assert result.step == 12 and len(losses(tmp_path)) == 12


def climbs(m, batch, step, generator):
    """From step 6 on the loss is 100 times what it would be."""
    loss, metrics = objective(m, batch, step, generator)
    return loss * (100 if step >= 6 else 1), metrics


def test_a_loss_that_leaves_its_range_ends_the_run_and_is_not_saved(tmp_path: Path) -> None:
    config = replace(CONFIG, max_bad_steps=4, checkpoint_every=1, keep=1)
    with pytest.raises(UserError, match=r"after step 10: the loss is .* and was .* at first; .*step-00000006"):
        train(TrainState(model(), climbs, config), stream(), tmp_path / "a")
    with pytest.raises(UserError, match=r"after step 8: the loss is .*step-00000006"):  # at its end, before four steps
        train(TrainState(model(), climbs, replace(config, steps=8)), stream(), tmp_path / "b")
    assert train(TrainState(model(), objective, config), stream(), tmp_path / "a").step == 12


def test_a_loss_that_is_not_finite_at_the_end_is_an_error_and_no_result(tmp_path: Path) -> None:
    """Also in fewer steps than `max_bad_steps`; a gradient that overflows in the last step only counts."""
    config = replace(CONFIG, max_bad_steps=9, checkpoint_every=5)
    with pytest.raises(UserError, match=r"after step 12: 2 updates in a row .* not finite; .*step-00000010"):
        train(TrainState(model(), breaks(10, 11, where="loss"), config), stream(), tmp_path / "loss")
    result = train(TrainState(model(), breaks(11, where="gradient"), config), stream(), tmp_path / "gradient")
    assert (result.step, result.skipped) == (12, 1)


def test_a_step_size_out_of_all_reason_is_an_error_and_no_result(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"diverged .* lower lr \(1e\+06\)"):
        train(TrainState(model(), objective, replace(CONFIG, optimizer=AdamWConfig(lr=1e6))), stream(), tmp_path)


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    class Poison(Hook):
        def after_update(self, run):
            if run.step == 6:
                with torch.no_grad():
                    next(run.model.parameters()).fill_(math.inf)

    config = replace(CONFIG, checkpoint_every=3)
    with pytest.raises(UserError, match=r"after step 6: its weights are not finite; .*step-00000003"):
        train(TrainState(model(), objective, config), stream(), tmp_path, hooks=[Poison()])


def test_two_trainings_do_not_share_a_folder(tmp_path: Path) -> None:
    with exclusive_lock(tmp_path), pytest.raises(UserError, match="another process .*is writing to"):
        train(TrainState(model(), objective, CONFIG), stream(), tmp_path)


def test_a_run_resumes_from_the_older_checkpoint_if_the_newest_is_damaged(tmp_path: Path) -> None:
    for name in ("whole", "damaged"):
        train(TrainState(model(0.2), noisy, replace(FULL, steps=8, checkpoint_every=4)), stream(), tmp_path / name)
    (tmp_path / "damaged/checkpoints/step-00000008/optimizer.safetensors").write_bytes(b"nothing")
    train(TrainState(whole := model(0.2), noisy, FULL), stream(), tmp_path / "whole")
    with pytest.warns(UserWarning, match="step-00000008 is damaged") as caught:
        train(TrainState(mended := model(0.2), noisy, FULL), stream(), tmp_path / "damaged")
    assert len(caught) == 1
    assert losses(tmp_path / "damaged") == losses(tmp_path / "whole") and len(losses(tmp_path / "whole")) == 12
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), mended.parameters(), strict=True))


class Pictures:
    def __len__(self) -> int:
        return 20

    def batch(self, indices: np.ndarray, seeds: np.ndarray) -> dict[str, Tensor]:
        made = [np.random.default_rng(i).integers(0, 256, (3, 16, 16), np.uint8) for i in indices]
        return {"pixels": torch.from_numpy(np.stack(made))}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("decayed", ["matrices", "all"])
def test_a_dvae_in_parts_is_the_whole_one_bit_for_bit(decayed, device: str, tmp_path: Path) -> None:
    config = replace(FULL, steps=6, batch_size=4, precision=Auto(), optimizer=AdamWConfig(lr=3e-3, decay_scope=decayed))

    def go(steps: int, out: str) -> DVAE:
        torch.manual_seed(0)
        dvae = DVAEConfig(size=16, width=16, groups=3, blocks=1, vocab=32, code_width=16, code_gain=3.0).build()
        train(
            TrainState(dvae, BalancedELB(), replace(config, steps=steps), device=device),
            Stream(Pictures(), 4),
            tmp_path / out,
        )
        return dvae

    whole, _, parts = go(6, "whole"), go(3, "parts"), go(6, "parts")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_saves(number: int, tmp_path: Path) -> None:
    sent = []

    def interrupted(m, batch, step, generator):
        if step == 6 and not sent:  # an objective runs once for each micro-batch
            sent.append(number)
            os.kill(os.getpid(), number)
        return noisy(m, batch, step, generator)

    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match="after step 7") as stop:
        train(TrainState(model(), interrupted, FULL), stream(), tmp_path / "a")
    assert signal.getsignal(number) is before
    assert stop.value.step == 7 and stop.value.checkpoint == latest(tmp_path / "a")
    train(TrainState(model(), noisy, FULL), stream(), tmp_path / "a")
    train(TrainState(model(), noisy, FULL), stream(), tmp_path / "b")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    def impatient(m, batch, step, generator):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return objective(m, batch, step, generator)

    with pytest.raises(KeyboardInterrupt):
        train(TrainState(model(), impatient, CONFIG), stream(), tmp_path)
    assert latest(tmp_path) is None


@dataclass(frozen=True, kw_only=True)
class Earlier:
    width: int = 8


@dataclass(frozen=True, kw_only=True)
class Later:
    width: int = 8
    depth: int = 1
    schedule: Constant | Cosine = field(default_factory=Cosine)


def test_a_setting_that_a_description_lacks_counts_as_a_difference(tmp_path: Path) -> None:
    def go(config: TrainConfig, part: Earlier | Later) -> int:
        return train(
            TrainState(model(), objective, config), stream(), tmp_path, record={"part": part, "data": "a"}
        ).step

    go(replace(CONFIG, steps=5), Earlier())
    with pytest.raises(UserError, match=r"another part\.depth, part\.schedule: "):
        go(CONFIG, Later())
    assert go(CONFIG, Earlier()) == 12


def test_another_config_is_refused_by_name(tmp_path: Path) -> None:
    def go(config: TrainConfig, **kwargs):
        return train(TrainState(model(), objective, config), stream(), tmp_path, **kwargs)

    go(replace(CONFIG, steps=5), record={"model": {"width": 8}})
    with pytest.raises(UserError, match=r"another training\.optimizer\.lr, model\.width: "):
        go(replace(CONFIG, optimizer=AdamWConfig(lr=1.0)), record={"model": {"width": 9}})
    with pytest.raises(UserError, match=r"lacks|unexpected|shape"):
        train(TrainState(nn.Linear(4, 1), objective, CONFIG), stream(), tmp_path, record={"model": {"width": 8}})
    longer = replace(CONFIG, log_every=2, checkpoint_every=3, keep=5)
    assert go(longer, record={"model": {"width": 8}}).step == 12
    assert json.loads((tmp_path / "config.json").read_text())["training"]["keep"] == 5


def test_activations_are_recomputed_where_the_model_offers_it(tmp_path: Path) -> None:
    config = replace(CONFIG, checkpoint_activations=True)
    with pytest.raises(UserError, match="Sequential"):
        train(TrainState(model(), objective, config), stream(), tmp_path)

    class Offers(nn.Linear):
        on = False

        def set_checkpointing(self, on: bool) -> None:
            self.on = on

    offering = Offers(4, 1)
    train(TrainState(offering, objective, config), stream(), tmp_path)
    assert offering.on


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"accumulate": 13}, {"keep": 0}])
def test_settings_out_of_range_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(CONFIG, **wrong)


class Memory:
    """States in memory, the last one only."""

    def __init__(self) -> None:
        self.kept: dict[Path, Any] = {}

    def save(self, step, tensors, state):
        where = Path(f"memory-{step}")
        self.kept = {where: copy.deepcopy(({name: dict(group) for name, group in tensors.items()}, state))}
        return where

    def latest(self):
        return next(iter(self.kept), None)

    def flush(self):
        pass

    def load(self, checkpoint, model):
        return copy.deepcopy(self.kept[checkpoint])

    def error_buffers(self, checkpoint, model):
        return iter(())

    def acquire(self):
        pass


def test_states_may_be_kept_elsewhere(tmp_path: Path) -> None:
    memory, parts, result = Memory(), None, None
    for steps in (5, 12):
        parts = blocks(0.2)
        config = replace(FULL, steps=steps)
        result = train(TrainState(parts, noisy, config), stream(), tmp_path / "parts", checkpointer=memory)
    assert result and result.checkpoint == Path("memory-12") and not (tmp_path / "parts" / "checkpoints").exists()
    train(TrainState(whole := blocks(0.2), noisy, FULL), stream(), tmp_path / "whole")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert parts and all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True))


def test_a_batch_says_which_samples_it_has_also_after_a_resume(tmp_path: Path) -> None:
    seen = []

    def watching(m, batch, step, generator):
        seen.extend(batch["index"].tolist())
        return noisy(m, batch, step, generator)

    for steps in (5, 12):
        train(TrainState(model(), watching, replace(FULL, steps=steps)), stream(), tmp_path)
    planned = [i for step in range(12) for i in stream().batch_indices(12 * step)[0]]
    assert seen == planned


def test_the_loss_is_computed_within_the_forward_of_one_module(tmp_path: Path) -> None:
    """A wrapper acts around the whole computation of the loss, for any method of the model that is called."""
    calls = []

    class Watched(SingleProcess):
        def prepare(self, trainable, device, dtype):
            trainable.register_forward_pre_hook(lambda *_: calls.append("begin"))
            trainable.register_forward_hook(lambda *_: calls.append("end"))
            return trainable

    def around(m, batch, step, generator):
        calls.append("loss")
        return objective(m, batch, step, generator)

    train(TrainState(model(), around, replace(CONFIG, steps=2), parallel=Watched()), stream(), tmp_path)
    assert calls == ["begin", "loss", "end"] * 2
    load_weights(model(), tmp_path)  # under the model's own names


@dataclass(frozen=True, kw_only=True)
class Doubled(Fp32):
    """Converts each linear layer to one that computes in double precision."""

    def apply(self, model: nn.Module) -> nn.Module:
        for i, layer in enumerate(model):  # type: ignore[arg-type]
            if isinstance(layer, nn.Linear):
                model[i] = Double(layer)  # type: ignore[index]
        return model


class Double(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(p.detach().double()) for p in (linear.weight, linear.bias))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.double(), self.weight, self.bias)


def test_a_precision_converts_the_model_before_anything_knows_its_parameters(tmp_path: Path) -> None:
    config = replace(CONFIG, precision=Doubled(), ema_decay=0.5)
    train(TrainState(converted := model(), objective, config), stream(), tmp_path)
    assert {p.dtype for p in converted.parameters()} == {torch.float64}
    where = latest(tmp_path)
    assert where
    for name, key in (("model", "0.weight"), ("optimizer", "exp_avg.0.weight")):
        assert read_tensors(where, name)[key].dtype == torch.float64
    train(TrainState(plain := model(), objective, replace(CONFIG, ema_decay=0.5)), stream(), tmp_path / "plain")
    assert not torch.equal(converted[0].weight.float(), model()[0].weight)  # it has learned
    torch.testing.assert_close(converted[0].weight.float(), plain[0].weight)


class Notes(Progress):
    def note(self, text: str) -> None:
        self.notes = [*getattr(self, "notes", []), text]


def test_the_end_says_how_many_updates_were_skipped(tmp_path: Path) -> None:
    bars = Notes("a"), Notes("b"), Notes("c")
    for bar, broken in zip(bars, (breaks(), breaks(*range(11)), breaks()), strict=True):
        out = tmp_path / ("a" if bar.title == "a" else "b")
        result = train(TrainState(model(), broken, replace(CONFIG, max_bad_steps=20)), stream(), out, bar=bar)
        assert result.skipped == (bar.title != "a") * 11
    output = "11 of 12 updates were skipped, since their loss or gradient was not finite"
    assert not hasattr(bars[0], "notes") and bars[1].notes == [output]
    assert bars[2].notes[-1] == output  # again, where the run had ended


STATES = {
    "step": "x", "skipped": None, "consecutive_bad_steps": [], "initial_loss": "x", "seconds": {}, "config": [],
    "environment": 3,
    "parts": {"stream": {}, "schedule": {"total": 0.0, "count": 0, "best": [], "stale": 0, "halved": 0}},
}  # fmt: skip


@pytest.mark.parametrize("key", STATES)
def test_a_state_with_values_of_another_kind_is_refused_before_the_first_update(key: str, tmp_path: Path) -> None:
    config = replace(CONFIG, schedule=Plateau(window=2), checkpoint_every=6)
    train(TrainState(model(), objective, replace(config, steps=6)), stream(), tmp_path)
    (saved,) = completed(tmp_path)
    state = json.loads((saved / "state.json").read_text())
    stream_state = state["parts"]["stream"]
    for value in (STATES[key], "absent"):
        state = {name: old for name, old in state.items() if name != key} | ({} if value == "absent" else {key: value})
        if isinstance(value, dict) and key == "parts":
            value["stream"] = stream_state
        (saved / "state.json").write_text(json.dumps(state))
        lines = [f"{file_hash(path)}  {path.name}\n" for path in saved.iterdir() if path.name != "SHA256SUMS"]
        (saved / "SHA256SUMS").write_text("".join(lines))
        with pytest.raises(UserError, match="does not fit this run"):
            train(TrainState(model(), objective, config), stream(), tmp_path)
