"""Hooks: when they are called, what they may change, and that their states survive."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from limner.data.stream import Stream
from limner.numerics.precision import Fp32
from limner.optim.grad_access import total_norm
from limner.optim.optimizers import AdamWConfig, MuonConfig
from limner.training.checkpoint import completed
from limner.training.config import TrainConfig
from limner.training.hooks import Hook
from limner.training.loop import train
from limner.training.metrics_log import read_metrics
from limner.training.train_state import TrainState

CONFIG = TrainConfig(steps=4, batch_size=4, accumulate=2, optimizer=AdamWConfig(lr=1e-2), precision=Fp32(), log_every=2)


class Points:
    def __len__(self) -> int:
        return 10

    def batch(self, indices: np.ndarray, seeds: np.ndarray) -> dict[str, Tensor]:
        return {"x": torch.from_numpy(np.stack([indices, indices % 3], 1)).float()}


def objective(model: Any, batch: Any, step: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
    return (model(batch["x"]) - 1).square().mean(), {}


def go(out: Path, *hooks: Hook, model: nn.Module | None = None, config: TrainConfig = CONFIG, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    model = model or nn.Linear(2, 1)
    train(TrainState(model, objective, config), Stream(Points(), 4), out, hooks=hooks, **more)
    return model


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_each_is_called_in_its_place(tmp_path: Path) -> None:
    heard: list[tuple[str, str, int]] = []

    class Listen(Hook):
        def __init__(self, name: str) -> None:
            self.called = name

        @property
        def name(self) -> str:
            return self.called

        def before_step(self, run):
            assert all(p.grad is None for p in run.parameters)
            self.hear("begin", run)

        def after_backward(self, run):
            assert all(p.grad is not None for p in run.parameters)
            self.hear("gradients", run)

        def before_update(self, run):
            assert float(total_norm(p.grad for p in run.parameters)) <= 0.1001
            self.hear("clipped", run)

        def after_update(self, run):
            assert math.isfinite(run.loss) and run.norm > 0
            self.hear("update", run)

        def before_log(self, run, row):
            assert row["step"] == run.step
            self.hear("report", run)

        def after_eval(self, run, metrics):
            assert metrics == {"score": run.step}
            self.hear("eval", run)

        def before_save(self, run):
            assert len(completed(tmp_path)) == (run.step - 1) // 3
            self.hear("save", run)

        def hear(self, what, run):
            heard.append((self.called, what, run.step))

    config = replace(CONFIG, checkpoint_every=3, eval_every=3, clip_norm=0.1)
    listened = go(tmp_path, Listen("a"), Listen("b"), config=config, evaluate=lambda model, step: {"score": step})
    expected = [
        ("begin", 0), ("gradients", 0), ("clipped", 0), ("update", 1),
        ("begin", 1), ("gradients", 1), ("clipped", 1), ("update", 2), ("report", 2),
        ("begin", 2), ("gradients", 2), ("clipped", 2), ("update", 3), ("report", 3), ("eval", 3), ("save", 3),
        ("begin", 3), ("gradients", 3), ("clipped", 3), ("update", 4), ("report", 4), ("eval", 4), ("save", 4),
    ]  # fmt: skip
    assert heard == [(name, *event) for event in expected for name in "ab"]
    assert same(listened, go(tmp_path / "plain", config=config))
    with pytest.raises(ValueError, match="have one name"):
        go(tmp_path / "twins", Listen("a"), Listen("a"))


def test_gradients_may_be_changed_before_they_are_measured(tmp_path: Path) -> None:
    class Unscale(Hook):
        """With the loss below, what a loss scale does."""

        def after_backward(self, run):
            for p in run.parameters:
                p.grad /= 1024

    def scaled(*arguments):
        loss, found = objective(*arguments)
        return loss * 1024, found

    config = replace(CONFIG, clip_norm=0.01, log_every=1)
    plain = go(tmp_path / "plain", config=config)
    torch.manual_seed(0)
    train(
        TrainState(model := nn.Linear(2, 1), scaled, config),
        Stream(Points(), 4),
        tmp_path / "scaled",
        hooks=[Unscale()],
    )
    assert same(model, plain)  # by a power of two, nothing is rounded
    rows = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("plain", "scaled")]
    assert [row["grad_norm"] for row in rows[0]] == [row["grad_norm"] for row in rows[1]]


class Momentum(Hook):
    """Adds to each gradient half of what was added before: numbers and tensors that must survive."""

    def __init__(self) -> None:
        self.calls, self.kept = 0, torch.zeros(1, 2)

    def after_backward(self, run):
        self.calls += 1
        self.kept = run.model.weight.grad + self.kept / 2
        run.model.weight.grad.copy_(self.kept)

    def state_dict(self):
        return {"calls": self.calls, "kept": self.kept}

    def load_state_dict(self, state):
        self.calls, self.kept = state["calls"], state["kept"]


def test_hook_states_are_restored_and_a_new_hook_starts_empty(tmp_path: Path) -> None:
    whole = go(tmp_path / "whole", Momentum())
    go(tmp_path / "parts", Momentum(), config=replace(CONFIG, steps=2))
    assert same(whole, go(tmp_path / "parts", again := Momentum()))
    assert again.calls == 4
    go(tmp_path / "later", config=replace(CONFIG, steps=2))
    go(tmp_path / "later", later := Momentum())
    assert later.calls == 2


class Rates(Hook):
    """The learning rate of each parameter group in the log."""

    def before_log(self, run, row):
        groups = [group for optimizer in run.optimizers for group in optimizer.param_groups]
        row |= {f"lr/{i}": group["lr"] for i, group in enumerate(groups)}


def test_a_hook_logs_what_the_loop_does_not(tmp_path: Path) -> None:
    blocks = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    blocks[0].blocks = nn.ModuleList([blocks[1]])
    config = replace(CONFIG, optimizer=MuonConfig(lr=0.04, fallback_adamw=AdamWConfig(lr=1e-3)), warmup_steps=4)
    go(tmp_path, Rates(), model=blocks, config=config)
    rows = [[row[f"lr/{i}"] for i in range(3)] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert rows == [pytest.approx([0.04 * f, 1e-3 * f, 1e-3 * f]) for f in (0.5, 1.0)]


def test_a_hook_that_is_done_ends_the_run_and_a_repeated_call_does_not_continue_it(tmp_path: Path) -> None:
    class UntilStep3(Hook):
        saved = ("steps",)
        steps = 0

        @property
        def done(self) -> bool:
            return self.steps >= 3

        def after_update(self, run: TrainState) -> None:
            self.steps += 1

    config = replace(CONFIG, steps=9)
    first = go(tmp_path, UntilStep3(), config=config)
    assert [path.name for path in completed(tmp_path)] == ["step-00000003"]
    hook = UntilStep3()
    assert same(first, go(tmp_path, hook, config=config))
    assert hook.steps == 3
