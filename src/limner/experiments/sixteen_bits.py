"""Training in 16 bits (Ramesh et al. 2021): gradient scales of resblocks (§2.4), and Adam's moments (B.2, App. D.2)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from limner.experiments.report import Finding, experiment
from limner.experiments.sweep import Result, Sweep, span
from limner.experiments.tiny_models import PRIOR, held_out_loss, train_prior
from limner.numerics.formats import FloatFormat
from limner.numerics.precision import Fp32
from limner.optim.optimizers import AdamW16Config, AdamWConfig
from limner.quantization.precisions import SimulatedGradients
from limner.training.grad_scaler import DynamicLossScaler, PerBlockGradScaler
from limner.training.hooks import Hook
from limner.training.train_state import TrainState

NARROW_FORMAT = FloatFormat(1, 3, 8, bias=-2)  # up to about 1,000: the first blocks' gradients at the initial scale
_SPEEDUP = 40  # the paper's rules adapt scales over hundreds of thousands of updates


class FastPerBlockGradScaler(PerBlockGradScaler):
    """The paper's rule in `NARROW_FORMAT`, `_SPEEDUP` times faster. `history` holds log2 of the scales after each
    update."""

    GROWTH = PerBlockGradScaler.GROWTH**_SPEEDUP
    BACKOFF_INTERVAL = PerBlockGradScaler.BACKOFF_INTERVAL // _SPEEDUP

    def __init__(self, run: TrainState) -> None:
        super().__init__(run, NARROW_FORMAT)
        self.history: list[list[float]] = []

    def after_backward(self, run: TrainState) -> None:
        super().after_backward(run)
        self.history.append(self.scales.log2().tolist())


class FastLossScaler(DynamicLossScaler):
    """`DynamicLossScaler`, `_SPEEDUP` times faster."""

    GROWTH_INTERVAL = DynamicLossScaler.GROWTH_INTERVAL // _SPEEDUP


def grad_scales_trial(*, steps: int, depth: int, scaler: type[Any] | None = None, **settings: Any) -> Result:
    """Return the losses, the number of skipped updates, and the scales of resblocks after each update."""
    scalers: list[Any] = []

    def make_hooks(run: TrainState) -> list[Hook]:
        scalers.extend([scaler(run)] if scaler else [])
        return scalers

    run, losses = train_prior(
        model=replace(PRIOR, depth=depth), hooks=make_hooks, clip_norm=1.0, steps=steps, max_bad_steps=steps, **settings
    )  # fmt: skip
    scales = scalers[0].history if scaler is FastPerBlockGradScaler else []
    return {"loss": losses, "held_out": held_out_loss(run.model), "skipped": run.skipped, "scales": scales}


@experiment(
    "A gradient scale for each resblock trains in a format with too few exponent bits for one loss scale",
    "Ramesh et al. 2021, §2.4, App. D.1, Figure 12",
)
def grad_scales(folder: Path, quick: bool) -> Finding:
    """Compare a scale per resblock, a loss scale, and no scale with fp32.

    Gradients that enter a resblock shrink from the first block to the last, and more so in deeper models. A format with
    few exponent bits cannot hold the gradients of all blocks at one scale: if those of the first blocks are just below
    its largest number, those of the last blocks underflow to zero. The paper observed underflow in fp16 from about a
    billion parameters. The model here is small, so its format is narrower: three exponent bits for the gradients of all
    linear layers in the blocks, simulated.
    """
    seeds, depth, steps = (range(1, 2), 2, 15) if quick else (range(1, 4), 12, 400)
    narrow, form = SimulatedGradients(gradient_format=NARROW_FORMAT), str(NARROW_FORMAT)
    grid: dict[tuple[str, str], dict[str, Any]] = {
        ("fp32", "-"): {"precision": Fp32()},
        (form, "per resblock"): {"precision": narrow, "scaler": FastPerBlockGradScaler},
        (form, "loss"): {"precision": narrow, "scaler": FastLossScaler},
        (form, "none"): {"precision": narrow},
    }
    sweep = Sweep(folder, grad_scales_trial, grid, seeds, steps=steps, depth=depth, batch=32, lr=2e-3)
    fp32, per_block, single, _ = (runs.values("held_out") for runs in sweep.runs.values())
    history = sweep.runs[form, "per resblock"].values("scales")
    scales = history[:, -1].mean(0)
    block_gap, single_gap = per_block.mean() - fp32.mean(), single.mean() - fp32.mean()
    charted = dict.fromkeys(np.linspace(0, len(scales) - 1, 4).round().astype(int).tolist())
    return sweep.finding(
        bool(block_gap < 0.25 * single_gap and per_block.max() < single.min()),
        f"Gradients in {form} change the held-out loss by {block_gap:+.3f} with a scale per resblock "
        f"and {single_gap:+.3f} with one loss scale (fp32: {fp32.mean():.3f}); the claim holds if the first is less "
        f"than a quarter of the second. The scales at the end span {scales.max() - scales.min():.1f} powers of two, "
        f"from 2^{scales[0]:.1f} in the first resblock to 2^{scales[-1]:.1f} in the last.",
        ("gradients in", "scale"),
        {
            "training loss": lambda runs: f"{runs.losses().mean():.3f}",
            "held-out loss": lambda runs: f"{runs.mean('held_out'):.3f}",
            "of seeds": lambda runs: span(runs.values("held_out"), ".3f"),
            "skipped updates, max": lambda runs: runs.values("skipped").max().item(),
        },
        {
            "loss, first seed": {
                "fp32" if scale == "-" else scale: runs.curve for (_, scale), runs in sweep.runs.items()
            },
            "log2 of the scales, first seed": {
                f"resblock {i + 1}": list(enumerate(history[0, :, i].tolist())) for i in charted
            },
            "log2 of the scales at the end, over resblocks": {"mean of seeds": list(enumerate(scales.tolist()))},
        },
    )


def moments_trial(*, bits: int, width: int, lr: float, **settings: Any) -> Result:
    """Return the losses, the bytes of all moments, and the bytes of 16-bit moments."""
    betas = (0.9, 0.96)
    optimizer = AdamW16Config(lr=lr, betas=betas, max_exp_avg_sq=5.0) if bits == 16 else AdamWConfig(lr=lr, betas=betas)
    run, losses = train_prior(model=replace(PRIOR, width=width), optimizer=optimizer, **settings)
    states = [state for optim in run.optimizers for state in optim.state.values()]
    moments = [x for state in states for x in state.values() if torch.is_tensor(x) and x.ndim]
    return {
        "loss": losses,
        "held_out": held_out_loss(run.model),
        "bytes": sum(x.nbytes for x in moments),
        "bytes_16bit": sum(x.nbytes for x in moments if x.element_size() == 2),
    }


@experiment(
    "Adam's moments in 16 bits, 1-6-9 and 0-6-10, train as well as in 32, with half of the memory",
    "Ramesh et al. 2021, App. B.2 and D.2",
)
def sixteen_bit_moments(folder: Path, quick: bool) -> Finding:
    """Compare losses and bytes of 16-bit moments, 1-6-9 for the mean and 0-6-10 for the variance, and 32-bit moments.

    Six exponent bits cover the range of both moments; fp16's five do not. The variance is unsigned, and its running
    value is clipped at 5. Embeddings, gains and biases keep 32-bit moments. Loss differences up to 0.5% count as zero.
    """
    seeds, steps, width = (range(1), 20, 64) if quick else (range(5), 800, 128)
    grid = {f"{bits} bits": {"bits": bits} for bits in (32, 16)}
    sweep = Sweep(folder, moments_trial, grid, seeds, steps=steps, width=width, batch=32, lr=3e-3)
    full, half = sweep.runs.values()
    losses = [(full.losses(), half.losses()), (full.values("held_out"), half.values("held_out"))]
    gap, held_out_gap = (b.mean() / a.mean() - 1 for a, b in losses)
    worst = max(abs(b / a - 1).max() for a, b in losses)
    share = half.mean("bytes") / full.mean("bytes")
    matrices = 2 * half.mean("bytes_16bit") / full.mean("bytes")
    return sweep.finding(
        bool(max(abs(gap), abs(held_out_gap)) < 0.005 and share < 0.6),
        f"With moments of 16 bits the loss differs by {gap:+.2%} in training and {held_out_gap:+.2%} on "
        f"held-out scenes (means of {len(seeds)} seeds; at most {worst:.2%} for a single seed). Moments of matrices in "
        f"the blocks, {matrices:.0%} of all here, take half of their memory; all moments {share:.0%}.",
        ("moments",),
        {
            "training loss": lambda runs: f"{runs.losses().mean():.4f}",
            "deviation over seeds": lambda runs: f"{runs.losses().std():.4f}",
            "held-out loss": lambda runs: f"{runs.mean('held_out'):.4f}",
            "moments, MiB": lambda runs: f"{runs.mean('bytes') / 2**20:.2f}",
        },
        {"loss, first seed": sweep.curves},
    )
