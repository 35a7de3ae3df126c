"""Matrices of blocks stored in 16 bits, with their gradients (Ramesh et al. 2021, App. D)."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from limner.models.transformer import SIZES
from limner.numerics.precision import Fp32
from limner.objectives.autoregressive import Autoregressive
from limner.optim import adamw, grad_access
from limner.optim.adam_base import rms
from limner.optim.optimizers import AdamW16Config, AdamWConfig, Beta2WarmupAdamWConfig, MuonConfig, StableAdamWConfig
from limner.planner.dry_run import state_bytes
from limner.planner.launch import Launch
from limner.quantization import HalfLinear
from limner.quantization.precisions import Bf16Weights, Fp16Weights
from limner.training.config import TrainConfig
from limner.training.grad_scaler import scaling
from limner.training.hooks import Hook
from limner.training.loop import train
from limner.training.metrics_log import read_metrics
from limner.training.step import update
from limner.training.train_state import TrainState
from tokens_in_turn import PRIOR, Tokens

CONFIG = TrainConfig(
    steps=40, batch_size=8, accumulate=2, optimizer=AdamW16Config(lr=5e-3), ema_decay=0.9, log_every=1,
    checkpoint_every=7, precision=Fp16Weights(), scaling="resblocks",
)  # fmt: skip
CASES = [
    *(
        (Fp16Weights(), "resblocks", kind(lr=5e-3), 0.01)
        for kind in (AdamW16Config, AdamWConfig, StableAdamWConfig, Beta2WarmupAdamWConfig)
    ),
    (Bf16Weights(), "none", AdamW16Config(lr=5e-3), 0.03),
]  # the tolerances of the loss were written down before it was looked at


def learn(out, config):
    torch.manual_seed(0)
    model = PRIOR.build()
    train(TrainState(model, Autoregressive(), config), Tokens(), out)
    return model, [row["loss"] for row in read_metrics(out / "metrics.jsonl")]


def run_of(config, objective=None, model=PRIOR):
    torch.manual_seed(0)
    return TrainState(model.build(), objective or Autoregressive(), config)


class Look(Hook):
    """The gradients that an update is computed from, as numbers, by name."""

    def before_update(self, run):
        named = run.model.named_parameters()
        self.found = {name: grad_access.grad_values(p.grad).clone() for name, p in named if p.grad is not None}
        self.formats = {name: p.grad.dtype for name, p in run.model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "scales", "optimizer", "tolerance"), CASES)
def test_half_weights_learn_as_in_fp32_and_resume_bit_for_bit(precision, scales, optimizer, tolerance, tmp_path):
    config = replace(CONFIG, precision=precision, scaling=scales, optimizer=optimizer)
    model, losses = learn(tmp_path / "whole", config)
    _, exact = learn(tmp_path / "exact", replace(config, precision=Fp32(), scaling="none"))
    assert losses[-1] < 0.8 * losses[0] and losses[-1] == pytest.approx(exact[-1], rel=tolerance)
    assert losses != exact
    learn(tmp_path / "parts", replace(config, steps=7))
    again, parts = learn(tmp_path / "parts", config)
    assert parts == losses
    for one, other in zip(model.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_afterwards_the_model_is_an_ordinary_one_with_the_averages(tmp_path):
    """The result has the fp32 averages, not rounded to 16 bits. Training the model again converts it again."""
    model, _ = learn(tmp_path / "run", CONFIG)
    assert {type(x) for x in model.modules() if isinstance(x, nn.Linear)} == {nn.Linear}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    weight = model.blocks[0].mlp.branch.up.weight.detach()
    assert not torch.equal(weight, weight.half().float())
    train(TrainState(model, Autoregressive(), replace(CONFIG, steps=2)), Tokens(), tmp_path / "again")
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_matrices_of_blocks_and_their_gradients_are_in_16_bits_and_all_else_in_32():
    run, look = run_of(CONFIG), Look()
    update(run, next(Tokens()), [*scaling(run), look])
    for name, p in run.model.named_parameters():
        matrix = name.startswith("blocks.") and p.ndim == 2
        assert {p.dtype, look.formats[name]} == {torch.float16 if matrix else torch.float32}, name
    kinds = {name: type(x) for name, x in run.model.named_modules() if isinstance(x, nn.Linear)}
    assert {name for name, kind in kinds.items() if kind is not HalfLinear} == {"head.text", "head.image"}
    assert {x.dtype for x in run.ema.parameters.values()} == {torch.float32}


def test_gradients_that_fp16_would_lose_arrive_and_so_do_their_length_and_what_clipping_leaves():
    """Gradients of a loss times 1e-6. Unscaled in fp16, half of them would be zero."""

    def small(model, batch, step, generator):
        loss, found = Autoregressive()(model, batch, step, generator)
        return loss * 1e-6, found

    config = replace(CONFIG, clip_norm=1e-8, precision=Fp32(), scaling="none")
    exact, half = run_of(config, small), run_of(replace(config, precision=Fp16Weights(), scaling="resblocks"), small)
    expected, found = Look(), Look()
    update(exact, next(Tokens()), [expected])
    update(half, next(Tokens()), [*scaling(half), found])
    matrices = [name for name, format in found.formats.items() if format == torch.float16]
    for name in matrices:
        assert (found.found[name] - expected.found[name]).norm() < 0.02 * expected.found[name].norm(), name
    assert half.norm == pytest.approx(exact.norm, rel=0.01)
    clipped, of_exact = (torch.stack([grad.norm() for grad in x.found.values()]).norm() for x in (found, expected))
    assert clipped == pytest.approx(of_exact.item(), rel=0.01) and clipped < 0.1 * half.norm
    lost = torch.cat([(found.found[name].half() == 0).flatten() for name in matrices])
    assert lost.float().mean() > 0.5


def test_a_block_that_overflows_is_left_out_alone():
    run = run_of(replace(CONFIG, accumulate=1, scaling="resblocks-partial"))
    (hook,) = scaling(run)
    hook.scales[2] = hook.MAX_SCALE
    run.model.blocks[1].attention.branch.out.weight.register_hook(lambda grad: grad * math.inf)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    update(run, next(Tokens()), [hook])
    assert hook.skipped.tolist() == [0, 0, 1, 0] and not run.skipped
    for name, p in run.model.blocks.named_parameters():
        assert torch.equal(p, before[f"blocks.{name}"]) == name.startswith("1.attention"), name


@pytest.mark.parametrize("scales", ["loss", "tensors"])
def test_the_other_kinds_of_scaling_give_the_same_gradients(scales):
    config = replace(CONFIG, clip_norm=None)
    exact, half = run_of(replace(config, precision=Fp32(), scaling="none")), run_of(replace(config, scaling=scales))
    expected, found = Look(), Look()
    update(exact, next(Tokens()), [expected])
    update(half, next(Tokens()), [*scaling(half), found])
    for name, grad in expected.found.items():
        assert (found.found[name] - grad).norm() <= 0.02 * grad.norm(), name


def test_rms_is_that_of_the_gradients_as_numbers():
    run = run_of(replace(CONFIG, optimizer=StableAdamWConfig(lr=1e-3)))
    (hook,), batches, seen = scaling(run), Tokens(), {}

    class Before(Hook):
        def before_update(self, run):
            names = {p: name for name, p in run.model.named_parameters()}
            seen.update({names[p]: value.item() for p, value in rms(run.optimizers)})

    for _ in range(3):
        update(run, next(batches), [hook, Before()])
    (optimizer,) = run.optimizers
    own = optimizer.rms(run.model.named_parameters())
    assert own == pytest.approx(seen, rel=1e-4) and any("blocks" in name for name in own)


def test_muon_says_that_it_cannot():
    with pytest.raises(ValueError, match="Muon cannot update weights in 16 bits"):
        run_of(replace(CONFIG, optimizer=MuonConfig()))


@pytest.mark.parametrize("optimizer", [AdamW16Config(), AdamWConfig()])
def test_memory_equals_the_plan(optimizer):
    config = replace(SIZES["tiny"], width=128, heads=2, text_vocab=64, image_vocab=32, text_len=6, grid=(4, 4))
    run, taken = run_of(replace(CONFIG, accumulate=1, optimizer=optimizer, ema_decay=None), model=config), {}

    class Measure(Hook):
        def after_backward(self, run):
            taken.update(state_bytes(run))

    generator, hooks = torch.Generator().manual_seed(0), [*scaling(run), Measure()]
    for _ in range(2):  # moments are there from the first update on
        batch = {"text": torch.randint(64, (2, 6), generator=generator)}
        update(run, {**batch, "image": torch.randint(32, (2, 16), generator=generator)}, hooks)
    assert taken == Launch(config=config, training=run.config, gpus=1).state
    if isinstance(optimizer, AdamW16Config):
        fp32 = replace(run.config, precision=Fp32(), scaling="none", optimizer=AdamWConfig())
        assert sum(taken.values()) < 0.6 * sum(Launch(config=config, training=fp32, gpus=1).state.values())


def test_the_noise_of_rounding_does_not_come_back_in_later_steps_or_other_tensors():
    rounded = []
    for before in (0, 1, 2**16, 2**20):
        weights = [nn.Parameter(torch.ones(64, 64, dtype=torch.float16)) for _ in range(2)]
        optimizer = adamw.AdamW16(weights, lr=2e-4, betas=(0.0, 0.0), weight_decay=0)  # 0.4 steps of fp16
        for p in weights:
            p.grad = torch.ones_like(p)
            optimizer.state[p]["step"] = torch.tensor(float(before))
            for moment in ("exp_avg", "exp_avg_sq"):
                optimizer.state[p][moment] = torch.zeros(64, 64)
        optimizer.step()
        rounded += [p.detach() for p in weights]
    assert all(0.2 < (p < 1).float().mean() < 0.8 for p in rounded)
    assert len({p.numpy().tobytes() for p in rounded}) == len(rounded)
