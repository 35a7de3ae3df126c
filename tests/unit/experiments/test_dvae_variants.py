"""Variants of the dVAE: schedules, densities and poolings are as named; criteria can hold and can fail."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from limner.experiments import dvae_variants
from limner.experiments.dvae_variants import GaussianELB, LaplaceELB, LinearAnneal, closes, only_linear_diverges
from limner.experiments.sweep import Runs
from limner.objectives.elbo import RelaxedELB
from toy_sweeps import reproduce


def test_a_linear_schedule_is_linear():
    tau = LinearAnneal(start=1, end=0.2, steps=4)
    assert [tau(step) for step in (0, 1, 2, 4, 9)] == pytest.approx([1, 0.8, 0.6, 0.2, 0.2])


@pytest.mark.parametrize(("kind", "low", "high"), [(LaplaceELB, -9, 9), (GaussianELB, -9, 9), (RelaxedELB, 0, 1)])
def test_densities_integrate_to_one_and_may_leave_the_range_of_pixels(kind, low, high):
    x = torch.linspace(low + 1e-6, high - 1e-6, 120_000, dtype=torch.float64).view(1, 3, 1, -1)
    mu, log_b = (torch.full_like(x, value) for value in (0.4, -1.0))
    density = torch.exp(-kind().nll(x, mu, log_b)).flatten()
    x = x.flatten()
    assert torch.trapezoid(density, x).item() == pytest.approx(1, abs=1e-3)
    if kind is not RelaxedELB:
        inside = (x > 0) & (x < 1)
        mass = kind().mass_outside(mu, log_b).item()
        assert mass == pytest.approx(1 - torch.trapezoid(density[inside], x[inside]).item(), abs=1e-3)


@pytest.mark.parametrize("pool", [nn.MaxPool2d, nn.AvgPool2d])
def test_a_trial_trains_with_its_pooling_and_betas(pool, monkeypatch):
    runs = []

    def train(model, objective, samples, **settings):
        runs.append((model, objective, settings))
        return type("Run", (), {"step": 20}), [0.0]

    monkeypatch.setattr(dvae_variants, "train_in_memory", train)
    monkeypatch.setattr(dvae_variants, "pictures", lambda count, seed: torch.zeros(2, 3, 16, 16, dtype=torch.uint8))
    result = dvae_variants.trial(seed=1, steps=20, beta=8.0, pool=pool)
    ((model, objective, _),) = runs
    pools = [module for module in model.modules() if isinstance(module, nn.MaxPool2d | nn.AvgPool2d)]
    assert [type(module) for module in pools] == [pool, pool]
    assert objective.beta(20) == 2 and objective.tau(20) == pytest.approx(1 / 16)
    assert 1 <= result["perplexity"] <= 2 and result["outside"] == 0


def test_both_bounds_agree_as_tau_falls(monkeypatch):
    noise = torch.randint(256, (4, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(dvae_variants, "pictures", lambda count, seed: noise)
    torch.manual_seed(0)
    model = dvae_variants.MODEL.build()

    def gap(tau):
        bound = RelaxedELB(tau=dvae_variants.Anneal(start=tau, end=tau, steps=1))
        return abs(dvae_variants.evaluate(model, bound, 1)["gap"])

    assert gap(1e-3) < gap(1.0) / 10


@pytest.mark.parametrize(
    ("wide", "narrow", "holds"),
    [
        ([0.5, 0.6, 0.55], [0.01, 0.02, 0.01], True),
        ([0.5, 0.6, 0.55], [-0.01, 0.01, -0.01], True),
        ([0.5, 0.6, 0.55], [0.2, 0.2, 0.2], False),
        ([0.5, 0.6, 0.55], [-0.2, 0.2, -0.2], False),  # a mean near 0, but no bound is near the other
        ([0.5, 0.6, 0.55], [-0.2, 0.2, 0.0], None),
        ([0.1, -0.1, 0.0], [0.0, 0.0, 0.0], None),  # no gap to close
        ([0.5], [0.0], None),
    ],
)
def test_a_closed_gap_is_a_tenth_of_the_first(wide, narrow, holds):
    assert closes(np.array(wide), np.array(narrow)) is holds


@pytest.mark.parametrize(
    ("cosine", "linear", "holds"), [(0, 6, True), (0, 4, True), (0, 3, False), (1, 6, False), (0, 0, False)]
)
def test_divergence_counts_only_for_the_linear_schedule(cosine, linear, holds):
    assert only_linear_diverges(cosine, linear, 6) is holds


def test_runs_diverge_that_end_early_or_above_their_start():
    losses = [[1.0, 0.5, 0.4], [1.0, 3.0, 2.0], [1.0, math.nan]]
    assert dvae_variants.diverged(Runs("x", {"steps": 3}, [{"loss": loss} for loss in losses])) == 2


def cell(true=-1.0, psnr=15.0, perplexity=9.0, gap=0.5, worst=None):
    loss = [1.0] * 280 + [worst if worst is not None else 0.1] * 20
    return {"true": true, "psnr": psnr, "perplexity": perplexity, "gap": gap, "outside": 0.0, "loss": loss}


@pytest.mark.parametrize(
    ("name", "cells", "holds"),
    [
        ("tau-gap", [cell(), cell(gap=0.1), cell(gap=0.001)], True),
        ("tau-gap", [cell(), cell(), cell()], False),
        ("kl-weight", [cell(), cell(psnr=16, perplexity=12), cell()], True),
        ("kl-weight", [cell(), cell(psnr=14, perplexity=12), cell()], False),
        ("kl-weight", [cell(), cell(), cell()], None),
        ("tau-schedule", [cell(), cell(), cell(worst=2.0), cell(worst=2.0)], True),
        ("tau-schedule", [cell(), cell(), cell(worst=2.0), cell()], False),
        ("pooling", [cell(), cell(true=-0.8)], True),
        ("pooling", [cell(), cell(true=-1.2)], False),
        ("pixel-density", [cell(), cell(true=-0.8), cell(true=-0.7)], True),
        ("pixel-density", [cell(), cell(true=-0.8), cell(true=-1.3)], False),
        ("pixel-density", [cell(), cell(true=-0.8), cell()], None),
    ],
)
def test_claims_hold_and_fail(name, cells, holds, monkeypatch, tmp_path):
    assert reproduce(name, cells, monkeypatch, tmp_path).holds is holds
