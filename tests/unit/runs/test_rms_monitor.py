"""RMS_t: equal to the paper's, logged in each step, with a warning before the loss spikes."""

import json
import math
import warnings
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from limner.errors import UserError
from limner.models.transformer import Block
from limner.numerics.formats import UE6M10
from limner.optim import AdamW16, Beta2WarmupAdamW, StableAdamW, grad_access, optimizers
from limner.optim.adam_base import read_moment, rms
from limner.optim.optimizers import AdamWConfig, MuonConfig
from limner.runs.monitors import RMSMonitor
from limner.training.checkpoint import Checkpointer, read_state
from limner.training.config import TrainConfig
from limner.training.loop import train
from limner.training.step import update
from limner.training.train_state import TrainState
from ranks import on_ranks

CONFIG = TrainConfig(
    steps=30,
    batch_size=2,
    optimizer=AdamWConfig(lr=1e-6, betas=(0.9, 0.99)),
    clip_norm=None,
    log_every=10,
    checkpoint_every=5,
)


def textbook(gradients, beta=0.99, eps=1e-8):
    """Algorithm 2's RMS_t of the last of a tensor's gradients, in float64, with its debiased beta."""
    u = torch.zeros_like(gradients[0], dtype=torch.float64)
    for t, g in enumerate(gradients, 1):
        g = g.double()
        debiased = beta * (1 - beta ** (t - 1)) / (1 - beta**t)
        u = debiased * u + (1 - debiased) * g**2
    return (g**2 / u.clamp_min(eps**2)).mean().sqrt()


def test_rms_equals_algorithm_2():
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(5, 7))
    optimizer = torch.optim.AdamW([p], lr=1e-3, betas=(0.9, 0.99), fused=True)
    gradients = []
    for t in range(6):
        p.grad = torch.randn(5, 7) * (50 if t == 5 else 1)
        gradients.append(p.grad.clone())
        if t:
            ((found, value),) = rms([optimizer])
            assert found is p
            torch.testing.assert_close(value.double(), textbook(gradients), rtol=1e-5, atol=0)
        optimizer.step()
    assert value > 2  # sqrt(6) at most, as long as there were six


@pytest.mark.parametrize("packed", [False, True])
def test_rms_is_the_value_that_stable_adamw_clips_by(packed):
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(8, 8))
    optimizer = StableAdamW([p], lr=1e-3, betas=(0.9, 0.99), quantize_state=packed)
    for t in range(6):
        p.grad = torch.randn(8, 8) * (50 if t == 4 else 1)
        expected = [value.item() for _, value in rms([optimizer])]
        optimizer.step()
        if t:
            assert expected == pytest.approx(list(optimizer.rms([("p", p)]).values()), rel=1e-4)


SUPPORTED = {
    "AdamW": lambda p: torch.optim.AdamW([p], lr=1e-3, betas=(0.9, 0.96), fused=True),
    "StableAdamW": lambda p: StableAdamW([p], lr=1e-3, betas=(0.9, 0.96)),
    "StableAdamW, packed": lambda p: StableAdamW([p], lr=1e-3, betas=(0.9, 0.96), quantize_state=True),
    "Beta2WarmupAdamW": lambda p: Beta2WarmupAdamW([p], lr=1e-3),
    "AdamW16": lambda p: AdamW16([p], lr=1e-3),
    "AdamW16, fp32": lambda p: AdamW16([{"params": [p], "quantize_state": False}], lr=1e-3),
    "AdamW16, unbounded": lambda p: AdamW16([p], lr=1e-3, max_exp_avg_sq=math.inf),
}


def of_the_step(optimizer, p, before):
    """RMS_t of the step that was made, from the variance that it has left (before it was packed) and its correction."""
    (group,), (state,) = optimizer.param_groups, optimizer.state.values()
    t, g = int(state["step"]), grad_access.grad_values(p.grad).double()
    warms = "power" in group
    beta = 1 - t ** -group["power"] if warms else group["betas"][1]
    v = (beta * before + (1 - beta) * g**2).clamp_max(group.get("max_exp_avg_sq", math.inf))
    packed = not state["exp_avg_sq"].is_floating_point()
    tolerance = {"rtol": 1e-3 if packed else 1e-5, "atol": 2**-60 if packed else 0}
    end = UE6M10.max if packed else math.inf
    torch.testing.assert_close(read_moment(state, "exp_avg_sq").double(), v.clamp_max(end), **tolerance)
    u = (v / (1 if warms else 1 - beta**t)).clamp_min(group["eps"] ** 2)
    return (g**2 / u).mean().sqrt().item()


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rms_belongs_to_the_next_step(name, dtype):
    """Also of gradients that are small, that leave 0-6-10, and that AdamW16's bound on the variance holds down."""
    if dtype == torch.bfloat16 and name == "AdamW":
        dtype = torch.float32  # torch's would keep moments in 16 bits
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(16, 8).to(dtype))
    optimizer = SUPPORTED[name](p)
    for t, size in enumerate((1, 1e-3, 1, 50, 1e4, 1, 3, 1e-9, 1e-9, 1)):
        p.grad = (size * torch.randn(16, 8)).to(dtype)
        found = [value.item() for _, value in rms([optimizer])]
        before = read_moment(optimizer.state[p], "exp_avg_sq").double().clone() if t else torch.zeros(16, 8).double()
        optimizer.step()
        expected = of_the_step(optimizer, p, before)
        assert found == ([pytest.approx(expected, rel=1e-5)] if t else [])
        if t and hasattr(optimizer, "rms"):
            assert found == [pytest.approx(optimizer.rms([("p", p)])["p"], rel=1e-5)]


def test_rms_does_not_synchronize_with_the_device():
    """The host cannot read values of fake tensors; torch's fused AdamW counts steps on the device."""
    with FakeTensorMode():
        p = nn.Parameter(torch.zeros(5, 7))
        p.grad = torch.zeros_like(p)
        optimizer = torch.optim.AdamW([p], lr=1e-3)
        optimizer.state[p] = {"step": torch.ones(()), "exp_avg_sq": torch.zeros_like(p)}
        ((_, value),) = rms([optimizer])
        assert value.shape == ()


def test_a_beta_that_warms_up_is_followed():
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(8, 8))
    optimizer, u = Beta2WarmupAdamW([p], power=0.5), torch.zeros(8, 8)
    for t in range(1, 6):
        p.grad = torch.randn(8, 8) * t
        u = u + (p.grad**2 - u) * t**-0.5
        found = [value.item() for _, value in rms([optimizer])]
        assert found == ([] if t == 1 else pytest.approx([(p.grad**2 / u).mean().sqrt().item()], rel=1e-5))
        optimizer.step()


def of_shards(shards):
    """RMS_t of two matrices and a vector, and how many sums over shards it takes."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((6, 4), (4, 4), (4,))]
    gradients = [torch.randn_like(p) for p in parameters]
    if shards > 1:
        mesh = init_device_mesh("cpu", (shards,))
        parameters, gradients = (
            [distribute_tensor(x.detach(), mesh, [Shard(0)], src_data_rank=None) for x in tensors]
            for tensors in (parameters, gradients)
        )
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
    optimizer.step()
    with mock.patch.object(distributed, "all_reduce", wraps=distributed.all_reduce) as sums:
        return [value.item() for _, value in rms([optimizer])], sums.call_count


def test_shards_are_summed_together():
    alone, _ = of_shards(1)
    for found, sums in on_ranks(2, of_shards, 2):
        assert found == pytest.approx(alone, rel=1e-5) and sums == 1


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 1)


def objective(model, batch, step, generator):
    """Gradients that hardly change, but for two steps."""
    return model.b(model.a(batch["x"])).mean() * (1_000 if step in (24, 25) else 1), {}


class Endless:
    def __init__(self):
        self.position = 0

    def __next__(self):
        self.position += 1
        return {"x": 1 + 0.1 * torch.randn(2, 3, generator=torch.Generator().manual_seed(self.position))}

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = int(state["position"])


def trained(out, steps=30, optimizer=CONFIG.optimizer):
    torch.manual_seed(0)
    config = replace(CONFIG, steps=steps, optimizer=optimizer)
    train(TrainState(Line(), objective, config), Endless(), out, hooks=[RMSMonitor(out)])
    return [json.loads(line) for line in (out / "stability.jsonl").read_text().splitlines()]


def test_every_step_is_logged_once_also_by_a_resumed_run_and_a_spike_is_reported_once(tmp_path):
    with pytest.warns(UserWarning, match=r"step 26: RMS_t of .*a\.weight \(\d\.\d\).* Stable") as caught:
        whole = trained(tmp_path / "whole")
    assert len(caught) == 1
    assert [row["step"] for row in whole] == list(range(1, 31))
    assert whole[0]["rms"] == {} and set(whole[9]["rms"]) == {"a.weight", "b.weight"}
    assert max(row["rms"]["a.weight"] for row in whole[15:24]) < 2.3 < whole[24]["rms"]["a.weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained(tmp_path / "parts", 17)
        assert trained(tmp_path / "parts") == whole


def test_rms_uses_the_clipped_gradients_that_the_optimizer_averages(tmp_path):
    """Gradients grow, are clipped to one length: the running mean is up to date, as StableAdamW itself says."""
    torch.manual_seed(0)
    run = TrainState(
        model := Line(), objective, replace(CONFIG, clip_norm=0.01, optimizer=optimizers.StableAdamWConfig(lr=1e-6))
    )
    hook, stream, found = RMSMonitor(tmp_path), Endless(), {}
    for _ in range(28):
        update(run, next(stream), [hook])
        found = run.optimizers[0].rms(model.named_parameters())
        assert all(value == pytest.approx(found[name], rel=1e-4) for name, value in hook.rms.items())
        assert max(hook.rms.values(), default=0.0) < 1.5
    assert hook.rms.keys() == {"a.weight", "b.weight"}
    model.b.weight.register_hook(lambda grad: grad * torch.nan)
    update(run, next(stream), [hook])
    assert hook.rms == {} and run.skipped == 1


def test_the_size_of_each_blocks_features_is_logged_now_and_then(tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block(8, 2) for _ in range(2))

    seen = []

    def through(model, batch, step, generator):
        x = batch["x"].new_ones(2, 4, 8).requires_grad_()
        for block in model.blocks:
            x = block(x, lambda q, k, v: v)
            if step % CONFIG.log_every == CONFIG.log_every - 1:
                seen.append(x.detach().abs().mean().item())
        return x.square().mean(), {}

    train(
        TrainState(Two(), through, CONFIG),
        Endless(),
        tmp_path,
        hooks=[RMSMonitor(tmp_path)],
        evaluate=lambda model, step: {},
    )
    rows = [json.loads(line) for line in (tmp_path / "stability.jsonl").read_text().splitlines()]
    features = {row["step"]: row["features"] for row in rows if "features" in row}
    assert list(features) == [10, 20, 30] and list(features[10]) == ["blocks.0", "blocks.1"]
    assert [x for row in features.values() for x in row.values()] == pytest.approx(seen, rel=0.01)


def test_parameters_updated_by_muon_have_no_second_moments():
    model = Line()
    model.blocks = nn.ModuleList([nn.Linear(4, 4)])
    run = TrainState(model, objective, replace(CONFIG, optimizer=MuonConfig()))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for optimizer in run.optimizers:
        optimizer.step()
    assert {id(p) for p, _ in rms(run.optimizers)} == {
        id(p) for name, p in model.named_parameters() if name != "blocks.0.weight"
    }


@pytest.mark.parametrize("lr", [1e15, 1e37])
@pytest.mark.filterwarnings("ignore:step .* RMS_t of .* is far above 1")
def test_a_run_that_diverges_ends_with_the_sentence_that_says_so(tmp_path, lr):
    """RMS_t and features are infinite by then, and null in the file."""

    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(8, 2)])

    def through(model, batch, step, generator):
        x = model.blocks[0](batch["x"].new_ones(2, 4, 8).requires_grad_(), lambda q, k, v: v)
        return (x - batch["x"].mean()).square().mean(), {}

    torch.manual_seed(0)
    config = replace(CONFIG, steps=60, optimizer=AdamWConfig(lr=lr), log_every=1, clip_norm=4.0)
    with pytest.raises(UserError, match="training diverged and stopped after step .*; there is no checkpoint yet"):
        train(
            TrainState(One(), through, replace(config, checkpoint_every=60)),
            Endless(),
            tmp_path,
            hooks=[RMSMonitor(tmp_path)],
        )
    rows = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "stability.jsonl").open()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)) and len(rows) >= 20
    numbers = [value for row in rows for part in ("rms", "features") for value in row.get(part, {}).values()]
    assert None in numbers


def test_a_state_with_an_infinite_rms_is_resumed_from(tmp_path):
    hook, again = RMSMonitor(tmp_path), RMSMonitor(tmp_path)
    hook.rms = {"a": math.inf, "b": 1.5}
    saved = Checkpointer(tmp_path, 1).save(1, {"x": {"x": torch.zeros(1)}}, hook.state_dict())
    again.load_state_dict(read_state(saved))
    assert again.rms == hook.rms
