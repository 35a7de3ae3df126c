"""Pipelines of four processes: gradients, losses and weights are those of one process, also if the layout changes."""

import gc
import math
import os
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from limner.distributed.pipeline import Pipelined
from limner.distributed.pipeline_layout import PipelineLayout
from limner.distributed.powersgd import PowerSGD, PowerSGDConfig
from limner.numerics.precision import Fp16, Fp32, Precision
from limner.training.grad_scaler import scaling
from limner.training.hooks import Hook
from limner.training.parallel import Parallel, SingleProcess
from limner.training.state import optimizer_tensors
from limner.training.step import update
from limner.training.train_state import TrainState
from pipeline_ranks import GROWING, SHRINKING, Layouts, batch, begin
from ranks import on_ranks

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this torch lacks process groups")


class Gradients(Hook):
    def after_backward(self, run: TrainState) -> None:
        self.found = {name: p.grad.clone() for name, p in run.model.named_parameters() if p.grad is not None}


def values(tensors: Any) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in dict(tensors).items() if not x.is_meta}


SCHEDULES = [
    ("gpipe", 4, 1), ("1f1b", 4, 1), ("interleaved", 2, 2), ("interleaved", 4, 2), ("1f1b", 2, 1), ("1f1b", 1, 1)
]  # fmt: skip
LAYOUTS = {
    f"{order} {k}x{4 // k} frozen {frozen}": (order, PipelineLayout(stages=k, replicas=4 // k, frozen=frozen, chunks=v))
    for order, k, v in SCHEDULES
    for frozen in (0, 3, 4)
    if k * v + frozen <= 8
}


def first_gradients(parallel: Parallel, frozen: int) -> tuple[dict[str, Tensor], float, float]:
    run, hook = begin(parallel), Gradients()
    if isinstance(parallel, SingleProcess):
        Layouts({0: PipelineLayout(stages=1, frozen=frozen)}).before_training(run)
    update(run, batch(0, parallel), [hook])
    return hook.found, run.loss, run.norm


def gradients_of_all() -> dict[str, Any]:
    found = {}
    for name, (order, layout) in LAYOUTS.items():
        found[name] = first_gradients(Pipelined(layout, "gpipe" if order == "gpipe" else "1f1b"), layout.frozen)
    return found


@pytest.fixture(scope="module")
def gradients() -> list[dict[str, Any]]:
    return on_ranks(4, gradients_of_all)


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_those_of_one_process(gradients, name):
    layout = LAYOUTS[name][1]
    expected, loss, norm = first_gradients(SingleProcess(), layout.frozen)
    found: dict[str, Tensor] = {}
    for rank in gradients:
        grads, its_loss, its_norm = rank[name]
        assert its_loss == pytest.approx(loss, abs=1e-6) and its_norm == pytest.approx(norm, abs=1e-6)
        found |= grads
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert (found[key] - value).abs().max() <= 1e-6, key


PATHS = {"shrinking": SHRINKING, "growing": GROWING}


def learn(parallel: Parallel, layouts: dict[int, PipelineLayout], dtype: torch.dtype) -> dict[str, Any]:
    """Six updates: losses, norms, and weights, moments and averages that this process holds."""
    run, hook = begin(parallel, dtype), Layouts(layouts)
    losses, norms = [], []
    hook.before_training(run)
    for step in range(6):
        update(run, batch(step, parallel), [hook])
        losses.append(run.loss)
        norms.append(run.norm)
    assert run.ema
    tensors = values(run.model.named_parameters()) | optimizer_tensors(run.model, run.optimizers)
    tensors |= values({f"ema.{name}": x for name, x in run.ema.state_dict().items()})
    parallel.assert_replicas_equal(run.parameters)
    return {"loss": losses, "norm": norms, "tensors": tensors, "cpu": hook.cpu_seconds}


def scale(parallel: Parallel, layouts: dict[int, PipelineLayout], kind: str, precision: Precision) -> dict[str, Any]:
    """Six updates with scales of resblocks, of which block 5 overflows in the second: losses, scales, weights."""
    run = begin(parallel, scaling=kind, precision=precision, accumulate=4 if isinstance(parallel, SingleProcess) else 1)
    hooks, losses = [*scaling(run), Layouts(layouts)], []
    model: Any = run.model
    model.blocks[5].mlp.branch.down.register_full_backward_hook(
        lambda module, found, given: (found[0] * (math.inf if run.step == 1 else 1),)
    )
    for step in range(6):
        update(run, batch(step, parallel), hooks)
        losses.append(run.loss)
    state = hooks[0].state_dict()
    hooks[0].close()
    assert not run.parallel.reduction.scales
    return {"loss": losses, "state": state, "skipped": run.skipped, "tensors": values(run.model.named_parameters())}


SCALED = [("resblocks", Fp32()), ("resblocks-partial", Fp32()), ("resblocks", Fp16())]


def learned(dtypes: Sequence[torch.dtype]) -> dict[Any, Any]:
    return {
        (path, dtype): learn(Pipelined(layouts[0]), layouts, dtype)
        for path, layouts in PATHS.items()
        for dtype in dtypes
    } | {case: scale(Pipelined(SHRINKING[0]), SHRINKING, *case) for case in SCALED}


@pytest.fixture(scope="module")
def paths() -> list[dict[Any, Any]]:
    return on_ranks(4, learned, (torch.float32, torch.float64))


@pytest.mark.parametrize("path", PATHS)
def test_a_run_whose_layout_changes_learns_as_one_process(paths, path):
    for dtype in (torch.float32, torch.float64):
        alone = learn(SingleProcess(), PATHS[path], dtype)
        found: dict[str, Tensor] = {}
        for rank in paths:
            result = rank[path, dtype]
            assert result["loss"] == pytest.approx(alone["loss"], abs=1e-6)
            assert result["norm"] == pytest.approx(alone["norm"], rel=1e-5)
            assert max(result["cpu"]) < 0.2
            found |= result["tensors"]
        assert found.keys() == alone["tensors"].keys()
        for name, value in alone["tensors"].items():
            if dtype == torch.float64:
                assert (found[name] - value).abs().max() <= 1e-6, name


@pytest.mark.parametrize("case", SCALED)
def test_blocks_are_scaled_as_in_one_process_also_if_the_layout_changes(paths, case):
    kind, precision = case
    alone, found = scale(SingleProcess(), SHRINKING, kind, precision), dict[str, Tensor]()
    assert alone["skipped"] == (kind == "resblocks")
    for rank in paths:
        result = rank[case]
        assert result["loss"] == pytest.approx(alone["loss"], abs=1e-6 if precision == Fp32() else 2e-3)
        assert result["skipped"] == alone["skipped"]
        assert {name: x.tolist() for name, x in result["state"].items()} == {
            name: x.tolist() for name, x in alone["state"].items()
        }
        found |= result["tensors"]
    for name, value in alone["tensors"].items():
        assert (found[name] - value).abs().max() <= (1e-5 if precision == Fp32() else 0.05), name


def resources() -> tuple[int, int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(distributed.distributed_c10d._world.pg_map)


def cycled() -> list[tuple[int, int, int]]:
    """Open descriptors, threads and groups after each of four cycles of all layouts."""
    layouts = list(SHRINKING.values())
    strategy, found = Pipelined(layouts[0]), []
    run = begin(strategy)
    for step in range(12):
        strategy.relayout(run, layouts[step % 3])
        update(run, batch(step, strategy))
        if step % 3 == 2:
            found.append(resources())
    begin(strategy)
    assert strategy.layout == layouts[0]
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="Linux lists the descriptors of a process")
def test_changes_of_the_layout_leak_nothing():
    for cycles in on_ranks(4, cycled):
        assert len(set(cycles)) == 1


def compressed() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The sum of the applied gradients of four steps, of which two follow a change of the layout, and what is left
    out."""
    make_reducer = partial(PowerSGD, PowerSGDConfig(rank=2, quantize=False))
    strategy = Pipelined(PipelineLayout(stages=2, replicas=2), make_reducer=make_reducer)
    run, sums = begin(strategy), dict[str, Tensor]()
    for step in range(4):
        if step == 2:
            strategy.relayout(run, PipelineLayout(stages=1, replicas=4))
        for name, value in applied(run, batch(step, strategy)).items():
            sums[name] = sums.get(name, torch.zeros(())) + value
        if step == 1:  # a process that gets the parameter later has not seen its gradients
            first, sums = sums, {}
    gathered: list[Any] = [None] * 4
    distributed.all_gather_object(gathered, first)
    before = {name: value for stage in gathered[:2] for name, value in stage.items()}
    return {name: before[name] + value for name, value in sums.items()}, strategy.reduction.mean_error_buffers()


def applied(run: TrainState, share: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients that an update would apply."""
    run.parallel.gradients(run, share)
    run.parallel.reduce(run.parameters)
    names, found = {p: name for name, p in run.model.named_parameters()}, {}
    norms = {names[p]: float(run.parallel.reduction.grad_norm([p])) for p in run.parameters}
    for part in run.parallel.reduction.parts(run.parameters):
        found |= {names[p]: p.grad.clone() for p in part if p.grad is not None}
        for p in part:
            p.grad = None
    assert norms == pytest.approx({name: float(grad.norm()) for name, grad in found.items()}, rel=1e-3, abs=1e-6)
    return found


def test_error_buffers_of_compressed_gradients_follow_the_layout():
    run = begin(SingleProcess())
    steps = [applied(run, batch(step, run.parallel)) for step in range(4)]
    for sums, kept in on_ranks(4, compressed):
        assert kept
        for name, value in sums.items():
            expected = sum(step[name] for step in steps)
            total = sum(step[name].norm() for step in steps)
            assert (value + kept.get(name, 0) - expected).norm() <= 1e-5 * total, name
