"""Gradient scales: the same gradients where nothing overflows, the paper's rule, skips of one block or tensor alone."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from limner.errors import UserError
from limner.models.contrastive import CLIPConfig
from limner.models.transformer import TransformerConfig
from limner.numerics.formats import FloatFormat
from limner.numerics.precision import Fp16, Fp32
from limner.objectives.autoregressive import Autoregressive
from limner.objectives.contrastive import CLIPLoss
from limner.optim.optimizers import AdamWConfig
from limner.quantization.precisions import SimulatedGradients
from limner.runs.monitors import RMSMonitor
from limner.text import PAD
from limner.training.config import TrainConfig
from limner.training.grad_scaler import PerBlockGradScaler, Scale, scaling
from limner.training.loop import train
from limner.training.parallel import SingleProcess
from limner.training.step import update
from limner.training.train_state import TrainState

MODEL = TransformerConfig(text_vocab=20, image_vocab=16, text_len=5, grid=(3, 3), width=16, depth=2, heads=2)
TRAIN = TrainConfig(
    steps=6, batch_size=4, optimizer=AdamWConfig(lr=1e-3), clip_norm=None, precision=Fp32(), log_every=1,
    checkpoint_every=2
)  # fmt: skip
KINDS = ("resblocks", "resblocks-partial", "loss", "tensors")


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    text, image = (torch.randint(0, n, (4, length), generator=generator) for n, length in ((20, 5), (16, 9)))
    text[0, 3:] = PAD  # so that padding has a gradient, too
    return {"text": text, "image": image}


def run_of(kind, model=MODEL, **settings):
    torch.manual_seed(1)
    return TrainState(model.build(), Autoregressive(), replace(TRAIN, scaling=kind, **settings))


def gradients(run, hooks=(), of=None):
    """Return the gradients that an update would apply, by parameter."""
    found = {}

    class Look:
        def __getattr__(self, name):
            return lambda run, *_: (
                name == "after_backward"
                and found.update(
                    {n: None if p.grad is None else p.grad.clone() for n, p in run.model.named_parameters()}
                )
            )

    update(run, of or batch(), [*hooks, Look()])
    return found


@pytest.mark.parametrize("model", [MODEL, replace(MODEL, layer_scale=True, qk_norm=True)])
@pytest.mark.parametrize("kind", KINDS)
def test_in_fp32_a_scale_changes_no_gradient(kind, model):
    """Nor that of a layer scale's gain, which lies where gradients are not scaled."""
    plain, run = run_of("none", model), run_of(kind, model)
    for one in (plain, run):
        for name, p in one.model.named_parameters():
            if name.endswith("gain"):
                nn.init.normal_(p, generator=torch.Generator().manual_seed(len(name)))
    expected, found = gradients(plain), gradients(run, scaling(run))
    for name, grad in expected.items():
        assert torch.allclose(found[name], grad, rtol=1e-5, atol=1e-9), name
    assert math.isclose(plain.norm, run.norm, rel_tol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_in_float64_a_scale_rounds_no_gradient(kind):
    plain, run = (
        TrainState(run_of(kind).model.double(), Autoregressive(), replace(TRAIN, scaling=k)) for k in ("none", kind)
    )
    expected, found = gradients(plain), gradients(run, scaling(run))
    for name, grad in expected.items():
        assert found[name].dtype == torch.float64
        assert torch.allclose(found[name], grad, rtol=1e-12, atol=1e-16), name
    assert run.loss == plain.loss != float(torch.tensor(run.loss, dtype=torch.float32))  # with all its digits


def test_resblock_scales_lift_gradients_that_fp16_loses():
    """With a loss that is a millionth of itself, half of the gradients are below fp16's smallest number."""

    def small(model, batch, step, generator):
        loss, found = Autoregressive()(model, batch, step, generator)
        return loss * 1e-6, found

    exact, lost, kept = (
        TrainState(run_of("none").model, small, replace(TRAIN, precision=precision, scaling=kind))
        for precision, kind in ((TRAIN.precision, "none"), (Fp16(), "none"), (Fp16(), "resblocks"))
    )
    grads = [gradients(run, scaling(run)) for run in (exact, lost, kept)]
    names = [n for n, p in exact.model.named_parameters() if n.startswith("blocks") and p.ndim == 2]

    def error(found):
        return max(float((found[n] - grads[0][n]).norm() / grads[0][n].norm()) for n in names)

    assert error(grads[1]) > 0.5
    assert error(grads[2]) < 0.05


def test_outside_the_resblocks_nothing_is_lost_since_it_is_in_fp32():
    """Patch embedding, output layers and the objective's product are not scaled (D.2)."""
    towers = CLIPConfig(
        text_vocab=20, text_len=6, size=16, patch=4, width=16, depth=2, heads=2, embedding=8, layer_scale=True
    )
    generator = torch.Generator().manual_seed(0)
    pairs = {
        "text": torch.randint(1, 20, (8, 6), generator=generator),
        "pixels": torch.randint(0, 256, (8, 3, 16, 16), generator=generator, dtype=torch.uint8),
    }

    def small(model, batch, step, generator):
        loss, found = CLIPLoss()(model, batch, step, generator)
        return loss * 1e-6, found

    torch.manual_seed(1)
    model = towers.build()
    for name, p in model.named_parameters():
        if name.endswith("gain"):
            nn.init.normal_(p)
    exact, run = (
        TrainState(model, small, replace(TRAIN, precision=precision, scaling=kind))
        for precision, kind in ((Fp32(), "none"), (Fp16(), "resblocks"))
    )
    start = copy.deepcopy(model.state_dict())
    expected = gradients(exact, of=pairs)
    model.load_state_dict(start)
    found = gradients(run, scaling(run), of=pairs)
    for name, grad in expected.items():
        assert (found[name] - grad).norm() < 0.05 * grad.norm(), name
    assert not torch.is_autocast_enabled("cpu")


def test_a_simulated_format_enters_a_block_as_fp16_does():
    """Both formats round values in fp16's range equally, and smaller values to zero."""
    torch.manual_seed(0)
    grad = torch.randn(4_000) * torch.exp2(torch.randint(-45, 2, (4_000,)))
    grad[:3] = torch.tensor([torch.inf, -torch.nan, 1e9])
    found = []
    for format, form in ((torch.float16, None), (torch.float32, FloatFormat(1, 5, 10))):
        x = torch.zeros(4_000, dtype=format, requires_grad=True)
        Scale.apply(x, torch.tensor(2.0**13), form).backward(grad)
        found.append(x.grad.float())
    assert torch.equal(*found) and not found[0][:3].any() and (found[0] == 0).float().mean() > 0.1


def test_an_overflow_in_a_simulated_format_leaves_the_block_alone():
    """Overflow at the entry of a block becomes zero, as in fp16, and its update is not skipped."""
    run = run_of("none", precision=SimulatedGradients(gradient_format=FloatFormat(1, 4, 3)))
    hook = PerBlockGradScaler(run, FloatFormat(1, 4, 3))
    hook.scales.fill_(PerBlockGradScaler.MAX_SCALE)
    found = gradients(run, [hook])
    assert hook.skipped.sum() == 0 and all(grad.isfinite().all() for grad in found.values())


def test_recomputed_blocks_have_the_same_gradients():
    plain, again = (run_of("resblocks", precision=Fp16(), checkpoint_activations=on) for on in (False, True))
    expected, found = (gradients(run, scaling(run)) for run in (plain, again))
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("kind", ["resblocks", "resblocks-partial"])
def test_the_rule_of_appendix_d(kind):
    run = run_of(kind)
    (hook,) = scaling(run)
    assert hook.names == [f"blocks.{i}.{part}" for i in (0, 1) for part in ("attention", "mlp")]
    assert hook.scales.tolist() == [PerBlockGradScaler.INIT_SCALE] * 4
    bad = list(hook.blocks[2].parameters())

    def step(number, overflow):
        run.step = number
        for p in run.model.parameters():
            p.grad = torch.ones_like(p)
        if overflow:
            bad[0].grad[0] = math.inf
        run.parallel.reduce(run.parameters)
        hook.after_backward(run)
        assert all((p.grad is None) == (overflow and kind == "resblocks-partial") for p in bad)
        assert all(p.grad is not None for p in hook.blocks[1].parameters())

    step(0, False)
    assert hook.scales.tolist() == pytest.approx([PerBlockGradScaler.INIT_SCALE * PerBlockGradScaler.GROWTH] * 4)
    assert run.model.blocks[0].mlp.branch.up.weight.grad[0, 0].item() == pytest.approx(
        1 / PerBlockGradScaler.INIT_SCALE
    )
    assert run.model.head.norm.weight.grad[0] == 1  # no resblock's: not scaled
    step(1, True)
    fallen = PerBlockGradScaler.INIT_SCALE * PerBlockGradScaler.GROWTH / PerBlockGradScaler.BACKOFF
    assert hook.scales[2].item() == pytest.approx(fallen)
    assert hook.scales[1].item() == pytest.approx(PerBlockGradScaler.INIT_SCALE * PerBlockGradScaler.GROWTH**2)
    step(2, True)  # no second fall within the window
    assert hook.scales[2].item() == pytest.approx(fallen)
    step(1 + PerBlockGradScaler.BACKOFF_INTERVAL, True)
    assert hook.scales[2].item() == pytest.approx(fallen / PerBlockGradScaler.BACKOFF)
    assert hook.skipped.tolist() == [0, 0, 3, 0]
    for value, limit in (
        (PerBlockGradScaler.MAX_SCALE * 1.1, PerBlockGradScaler.MAX_SCALE),
        (PerBlockGradScaler.MIN_SCALE / 1.1, PerBlockGradScaler.MIN_SCALE),
    ):
        hook.scales.fill_(value)
        step(500, False)
        assert hook.scales.tolist() == [limit] * 4


def test_replicas_scale_their_own_mean_as_one_process_does():
    """The loss is a mean over a process's samples, which knows no M: neither does the scale (D.1 with D.3)."""
    run = run_of("resblocks")
    run.parallel.world_size = 1_024
    hook = PerBlockGradScaler(run)
    assert hook.scales.tolist() == [PerBlockGradScaler.INIT_SCALE] * 4
    hook.scales.fill_(PerBlockGradScaler.MAX_SCALE)
    hook.after_backward(run)
    assert hook.scales.tolist() == [PerBlockGradScaler.MAX_SCALE] * 4


def test_an_overflow_in_one_block_skips_the_update_and_lowers_only_its_scale():
    """App. D.1: the update is skipped."""
    run = run_of("resblocks")
    (hook,) = hooks = scaling(run)
    run.model.blocks[1].mlp.branch.down.register_full_backward_hook(lambda _, found, given: (found[0] * math.inf,))
    before = [p.detach().clone() for p in run.model.parameters()]
    update(run, batch(), hooks)
    assert math.isfinite(run.loss) and not math.isfinite(run.norm) and run.skipped == 1
    assert all(torch.equal(p, old) for p, old in zip(run.model.parameters(), before, strict=True))
    assert not run.optimizers[0].state
    grown = PerBlockGradScaler.INIT_SCALE * PerBlockGradScaler.GROWTH
    fallen = PerBlockGradScaler.INIT_SCALE / PerBlockGradScaler.BACKOFF
    assert hook.scales.tolist() == pytest.approx([grown, grown, grown, fallen])


def test_an_overflow_in_one_block_may_leave_out_this_block_alone():
    """Infinite gradients within a block are filtered where it is left, and its parameters are not updated."""
    plain, run = run_of("none"), run_of("resblocks-partial")
    hooks = scaling(run)
    block = run.model.blocks[1].mlp
    block.branch.down.register_full_backward_hook(lambda module, found, given: (found[0] * math.inf,))
    before = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    expected = gradients(plain)
    found = gradients(run, hooks)
    assert math.isfinite(run.loss) and math.isfinite(run.norm) and run.skipped == 0
    for name, p in run.model.named_parameters():
        mine = name.startswith("blocks.1.mlp")
        assert (found[name] is None) == mine, name
        assert torch.equal(p, before[name]) == mine, name
    last = "head.image.weight"  # beyond the block: as without
    assert torch.allclose(found[last], expected[last], rtol=1e-5, atol=1e-9)


def test_one_tensor_alone_is_left_out_and_its_own_steps_are_counted():
    run = run_of("tensors")
    hooks = scaling(run)
    weight = run.model.blocks[0].mlp.branch.up.weight
    weight.register_hook(lambda grad: grad * math.nan)
    before = [p.detach().clone() for p in run.model.parameters()]
    update(run, batch(), hooks)
    same = [p for p, old in zip(run.model.parameters(), before, strict=True) if torch.equal(p, old)]
    assert len(same) == 1 and same[0] is weight
    assert run.skipped == 0 and hooks[0].skipped == 1
    assert weight not in run.optimizers[0].state  # no step yet, so that bias correction begins with its first update


def test_a_loss_scale_halves_skips_everything_and_grows_back(monkeypatch):
    run = run_of("loss")
    (hook,) = scaling(run)
    monkeypatch.setattr(hook, "GROWTH_INTERVAL", 2, raising=False)
    monkeypatch.setattr(type(hook), "GROWTH_INTERVAL", 2)
    handle = run.model.head.norm.weight.register_hook(lambda grad: grad * math.inf)
    before = [p.detach().clone() for p in run.model.parameters()]
    update(run, batch(), [hook])
    assert all(torch.equal(p, old) for p, old in zip(run.model.parameters(), before, strict=True))
    assert hook.scale.item() == hook.INIT_SCALE / 2 and run.skipped == hook.skipped == 1
    handle.remove()
    for _ in range(2):
        update(run, batch(), [hook])
    assert hook.scale.item() == hook.INIT_SCALE and run.skipped == 1


def test_a_loss_scale_that_no_gradient_stops_stays_finite():
    """In fp32 it doubles until it is infinite, and the gradients with it from then on."""
    run = run_of("loss")
    (hook,) = scaling(run)
    hook.scale.fill_(2.0**127)
    hook.finite_steps = hook.GROWTH_INTERVAL - 1
    for p in run.parameters:
        p.grad = torch.zeros_like(p)
    hook.after_backward(run)
    assert hook.scale.item() == 2.0**127 and hook.skipped == 0


class Endless:
    def __init__(self):
        self.position = 0

    def __next__(self):
        self.position += 1
        return batch(self.position)

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = int(state["position"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_has_the_same_scales_and_weights(kind, tmp_path):
    config = replace(TRAIN, scaling=kind, precision=Fp16())

    def trained(out, steps):
        torch.manual_seed(1)
        model = MODEL.build()
        result = train(TrainState(model, Autoregressive(), replace(config, steps=steps)), Endless(), out)
        return model.state_dict(), result.metrics

    whole, rows = trained(tmp_path / "whole", 6)
    trained(tmp_path / "parts", 4)
    parts, again = trained(tmp_path / "parts", 6)
    assert all(torch.equal(parts[name], value) for name, value in whole.items())
    names = [name for name in rows if name.startswith("scale")]
    assert names and {n: rows[n] for n in names} == {n: again[n] for n in names}


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_model_is_as_before_it_draws_and_trains_again(kind, tmp_path):
    """Nothing of a scale stays on it: in bf16 a hook would give the next layer fp32; a second run would scale twice."""

    def trained(kind, times):
        torch.manual_seed(1)
        model, strategy = MODEL.build(), SingleProcess()
        for i in range(times):
            hooks = [RMSMonitor(tmp_path / f"{kind}{i}")]
            config = replace(TRAIN, scaling=kind, steps=1)
            train(
                TrainState(model, Autoregressive(), config, parallel=strategy),
                Endless(),
                tmp_path / f"{kind}{i}",
                hooks=hooks,
            )
        return model, strategy

    model, strategy = trained(kind, 2)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    run = TrainState(model, Autoregressive(), TRAIN)
    for p in run.parameters:
        p.grad = torch.ones_like(p)
    strategy.reduce(run.parameters)
    assert all((p.grad == 1).all() for p in run.parameters)
    for p, expected in zip(model.parameters(), trained("none", 2)[0].parameters(), strict=True):
        torch.testing.assert_close(p, expected, rtol=1e-3, atol=1e-5)
    model.bfloat16()(**batch())


def test_a_run_that_fails_takes_its_hooks_away(tmp_path):
    model, config = MODEL.build(), replace(TRAIN, scaling="resblocks", max_bad_steps=1)
    with pytest.raises(UserError, match="diverged"):
        train(TrainState(model, lambda m, *_: (m.embed.start.sum() * math.nan, {}), config), Endless(), tmp_path)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_or_a_model_without_gradients_is_nothing_that_overflows(kind, device):
    torch.manual_seed(1)
    model = MODEL.build()
    model.blocks[0].mlp.requires_grad_(False)  # frozen
    run = TrainState(model, Autoregressive(), replace(TRAIN, scaling=kind), device)
    (hook,) = scaling(run)
    hook.after_backward(run)
    for p in run.model.blocks[1].parameters():
        p.grad = torch.ones_like(p)
    hook.after_backward(run)
    assert int(torch.as_tensor(hook.skipped).sum()) == 0
    hook.load_state_dict(hook.state_dict())
    hook.before_log(run, {})


def test_a_model_without_resblocks_is_refused_in_a_sentence():
    run = TrainState(
        nn.Linear(2, 2), lambda m, b, s, g: (F.mse_loss(m(b["x"]), b["x"]), {}), replace(TRAIN, scaling="loss")
    )
    with pytest.raises(UserError, match="lacks resblocks: choose another value for scaling"):
        PerBlockGradScaler(run)
