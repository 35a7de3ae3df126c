"""The report on values that are not finite names the operation and the module, and nothing in a finite step."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from limner.autograd.module_trace import ModuleTrace
from limner.errors import UserError
from limner.numerics.precision import Bf16, Fp32
from limner.planner.saved_tensors import random_batch
from limner.quantization.precisions import SwitchBackM
from limner.runs.train import train_all
from limner.tasks.build_scenes import SceneDataSettings, write_scenes
from limner.training.config import TrainConfig
from limner.training.nonfinite import NonfiniteReport, _FirstNonfinite
from limner.training.step import update
from limner.training.train_state import Diverged, TrainState
from tiny import tiny_recipe
from training_steps import CLIP, DVAE, PRIOR, step


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def run_of(function, **settings):
    model = nn.Sequential(nn.Linear(2, 2), Function(function), nn.Tanh())
    for p in model[0].parameters():
        p.data.zero_()
    return TrainState(model, lambda model, batch, *_: (model(batch["x"]).sum(), {}), TrainConfig(steps=9, **settings))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (torch.log, r"the result of aten::log in the forward pass of 1 is not finite"),
        (lambda x: (x - 1).sqrt(), r"the result of aten::sqrt in the forward pass of 1 is"),
        (lambda x: x / x, r"the result of aten::div.Tensor in the forward pass of 1 is"),
        (torch.sqrt, r"the result of aten::div.Tensor in SqrtBackward0, the backward pass of 1, is not finite"),
        (lambda x: x.masked_fill(x < 1, -torch.inf).softmax(-1), r"aten::_softmax in the forward pass of 1 is"),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_operation_and_its_module_are_named(function, message, accumulate):
    run, batch = run_of(function, batch_size=6, accumulate=accumulate), {"x": torch.ones(6, 2)}
    with pytest.raises(Diverged, match=f"^step 1: .*{message}"):
        update(run, batch, [NonfiniteReport()])


def test_a_parameter_is_named():
    run = run_of(torch.sin, batch_size=2)
    run.model[0].bias.data[1] = torch.nan
    with pytest.raises(Diverged, match=r"step 1: parameter 0\.bias is not finite"):
        update(run, {"x": torch.ones(2, 2)}, [NonfiniteReport()])


def train_until(run, hook):
    for _ in range(60):
        update(run, {"x": torch.ones(2, 2)}, [hook])


def test_the_step_is_repeated_with_its_random_numbers():
    """A loss that is infinite in half of the steps, by either generator."""

    def objective(model, batch, step, generator):
        draws = torch.rand((), generator=generator) + torch.rand(())
        return (model(batch["x"]) * 0 + 1).sum() / (draws > 1), {}

    for seed in range(8):
        run = TrainState(nn.Linear(2, 1), objective, TrainConfig(steps=9, batch_size=2, seed=seed))
        hook = NonfiniteReport()
        with pytest.raises(Diverged, match=r"step \d+: the result of aten::div.Tensor in the forward pass of the obj"):
            train_until(run, hook)


def test_scaled_gradients_may_overflow():
    run = run_of(torch.sqrt, batch_size=2, scaling="loss")
    update(run, {"x": torch.ones(2, 2)}, [NonfiniteReport()])
    assert run.skipped == 1


@pytest.mark.parametrize(
    ("model", "precision"), [(PRIOR, Fp32()), (PRIOR, Bf16()), (PRIOR, SwitchBackM()), (CLIP, Fp32()), (DVAE, Fp32())]
)
def test_a_finite_step_has_no_such_operation(model, precision):
    """Masks, uninitialized memory and padding do not count."""
    subject = step(model, precision)
    run, batch = subject.state(), random_batch(model, 2, subject.device)
    if "text" in batch:
        batch["text"][0, 2:] = -1
    with ModuleTrace(run.model) as trace, _FirstNonfinite(trace) as first:
        with precision.autocast("cpu"):
            loss, _ = run.trainable(batch, 0, run.generator)
        loss.backward()
    assert first.cause is None and loss.isfinite()


def test_a_run_stops_with_the_cause(tmp_path):
    write_scenes(tmp_path / "scenes", SceneDataSettings(count=12, size=24))
    recipe = tiny_recipe()
    optimizer = replace(recipe.dvae.training.optimizer, lr=1e30)
    training = replace(recipe.dvae.training, steps=9, optimizer=optimizer, warmup_steps=0)
    recipe = replace(recipe, dvae=replace(recipe.dvae, training=training))
    with pytest.raises(
        UserError, match=r"^step [2-9]: the result of aten::[\w.]+ in .* is not finite; there is no check"
    ):
        train_all(
            recipe, tmp_path / "scenes", tmp_path / "run", ("dvae",), stage_hooks=lambda folder: [NonfiniteReport()]
        )
