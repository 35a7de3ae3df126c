"""Freezing of converged blocks and the cache of their activations (He et al. 2021, PipeTransformer)."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from limner.experiments.report import Finding, experiment
from limner.experiments.sweep import Result, Sweep, deviation, span
from limner.experiments.tiny_models import PRIOR, held_out_loss, train_prior
from limner.objectives.autoregressive import Autoregressive
from limner.training.auto_cache import AutoCache
from limner.training.config import TrainConfig
from limner.training.freezing import Freezing
from limner.training.freezing_rules import FreezingRule, GradientNormFreezing, GuardedFreezing, ScheduledFreezing
from limner.training.train_state import TrainState

EVERY = 5  # updates between decisions


def alpha_trial(*, rule: FreezingRule, **settings: Any) -> Result:
    """Return the losses, the loss on new scenes, and the number of frozen blocks from the step of each decision on."""
    hooks: list[Freezing] = []

    def make_hooks(run: TrainState) -> list[Freezing]:
        hooks.append(Freezing(run, rule, EVERY, lambda metrics: 0.0))
        return hooks

    run, losses = train_prior(model=PRIOR, hooks=make_hooks, **settings)
    frozen = [(decision["step"], decision["frozen"]) for decision in hooks[0].decisions]
    return {"loss": losses, "held out": held_out_loss(run.model), "frozen": frozen}


@experiment(
    "A larger alpha of the freezing rule saves more of the training and costs a little accuracy",
    "He et al. 2021 (PipeTransformer), Figure 10",
)
def freeze_alpha(folder: Path, quick: bool) -> Finding:
    """Train with the paper's rule at several alphas, and with the guarded rule.

    The saving is the share of the blocks' products that need not be computed with a cache: the mean share of frozen
    blocks. "A little accuracy": the held-out loss rises by at most a tenth.
    """
    seeds, steps, alphas = (range(1), 20, (0.2,)) if quick else (range(3), 300, (0.1, 0.25, 0.5))
    grid: dict[str, dict[str, Any]] = {"none": {"rule": ScheduledFreezing(share=0.0)}}
    grid |= {f"alpha {alpha:.2g}": {"rule": GradientNormFreezing(alpha=alpha)} for alpha in alphas}
    grid["guarded"] = {"rule": GuardedFreezing()}
    sweep = Sweep(folder, alpha_trial, grid, seeds, steps=steps, batch=64)
    saved = {
        label: np.mean([sum(n for _, n in r["frozen"][:-1]) for r in runs.results]) * EVERY / (steps * PRIOR.depth)
        for label, runs in sweep.runs.items()
    }
    loss = {label: float(runs.values("held out").mean()) for label, runs in sweep.runs.items()}
    names, noise = [f"alpha {alpha:.2g}" for alpha in alphas], deviation(sweep.runs["none"].values("held out"))
    grows = all(saved[a] <= saved[b] for a, b in pairwise(names))
    return sweep.finding(
        bool(grows and loss[names[-1]] > loss["none"] - noise and loss[names[-1]] < 1.1 * loss["none"]),
        f"From {names[0]} to {names[-1]} the mean share of frozen blocks goes from {saved[names[0]]:.0%} to "
        f"{saved[names[-1]]:.0%}, and the held-out loss from {loss[names[0]]:.3f} to {loss[names[-1]]:.3f}; without "
        f"freezing it is {loss['none']:.3f}, with a standard deviation over seeds of {noise:.3f}. The guarded rule "
        f"freezes {saved['guarded']:.0%} and reaches {loss['guarded']:.3f}.",
        ("rule",),
        {
            "mean share of frozen blocks": lambda runs: f"{saved[runs.label]:.0%}",
            "held-out loss": lambda runs: f"{loss[runs.label]:.3f}",
            "of seeds": lambda runs: span(runs.values("held out"), ".3f"),
        },
        {
            "loss, first seed": sweep.curves,
            "frozen blocks, first seed": {label: runs.results[0]["frozen"] for label, runs in sweep.runs.items()},
        },
    )


def timing_trial(*, width: int, depth: int, samples: int) -> Result:
    """Return the milliseconds of reading and of computing one sample's activations, for each number of blocks."""
    torch.manual_seed(0)
    config = replace(PRIOR, width=width, depth=depth, grid=(16, 16), heads=width // 32)
    run = TrainState(config.build(), Autoregressive(), TrainConfig(steps=1))
    freezing = Freezing(run, GradientNormFreezing(), 1, lambda metrics: 0.0)
    batch = {
        "text": torch.randint(config.text_vocab, (samples, config.text_len)),
        "image": torch.randint(config.image_vocab, (samples, 256)),
    }
    read, computed = [], []
    with tempfile.TemporaryDirectory() as folder:
        cache = AutoCache(run, freezing, Path(folder), 1 << 28, [])
        for frozen in range(1, depth):
            freezing.level = float(frozen)
            cache.before_step(run)
            cache.activations(run.model, batch)
            read.append(1e3 * cache.read_seconds)
            computed.append(1e3 * cache.computed_seconds)
        cache.close()
    return {"read": read, "computed": computed}


@experiment(
    "Caching few frozen blocks is slower than computing them: the cache must begin at some depth",
    "He et al. 2021 (PipeTransformer), Figure 12",
)
def cache_timing(folder: Path, quick: bool) -> Finding:
    """Time reading and computing the activations of one sample by the number of frozen blocks, for two widths."""
    depth, widths = (3, (64,)) if quick else (12, (64, 256))
    grid = {str(width): {"width": width} for width in widths}
    sweep = Sweep(folder, timing_trial, grid, depth=depth, samples=4, workers=1)
    begins = {}
    for label, runs in sweep.runs.items():
        pairs = zip(runs.results[0]["read"], runs.results[0]["computed"], strict=True)
        begins[label] = next((k for k, (read, computed) in enumerate(pairs, 1) if read < computed), depth)
    return sweep.finding(
        any(first > 1 for first in begins.values()),
        "Reading is faster from "
        + " and ".join(f"{first} of {depth} blocks on at width {label}" for label, first in begins.items())
        + "; the paper's systems begin at 3 of 12 blocks (ViT) and 5 of 24 (BERT).",
        ("width",),
        {
            "reading, ms": lambda runs: span(np.array(runs.results[0]["read"]), ".2f"),
            "computing 1 block, ms": lambda runs: f"{runs.results[0]['computed'][0]:.2f}",
            f"computing {depth - 1} blocks, ms": lambda runs: f"{runs.results[0]['computed'][-1]:.2f}",
        },
        {
            f"milliseconds at width {label}, over frozen blocks": {
                name: list(enumerate(runs.results[0][name], 1)) for name in ("read", "computed")
            }
            for label, runs in sweep.runs.items()
        },
    )
