"""Training in 16 bits: gradient scales of resblocks and Adam's moments (Ramesh et al. 2021, §2.4, B.2, App. D.2), and
gradients that overflow (Wortsman et al. 2023, App. G)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from limner.experiments.recorders import MagnitudeRecorder, OverflowRecorder
from limner.experiments.report import Finding, experiment
from limner.experiments.spikes import PATCHES, RMSRecorder
from limner.experiments.sweep import Result, Runs, Sweep, all_above, deviation, over_seeds, span
from limner.experiments.tiny_models import CLIP, PRIOR, held_out_loss, train_clip, train_prior
from limner.numerics.formats import FloatFormat
from limner.numerics.precision import Fp32
from limner.optim.optimizers import AdamW16Config, AdamWConfig
from limner.quantization.precisions import SimulatedGradients
from limner.quantization.simulated_gradients import simulate_cast
from limner.training.grad_scaler import DynamicLossScaler, PerBlockGradScaler, StaticLossScaler
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
            "deviation over seeds": lambda runs: f"{deviation(runs.losses()):.4f}",
            "held-out loss": lambda runs: f"{runs.mean('held_out'):.4f}",
            "moments, MiB": lambda runs: f"{runs.mean('bytes') / 2**20:.2f}",
        },
        {"loss, first seed": sweep.curves},
    )


FP16 = FloatFormat(1, 5, 10, bias=16)  # fp16, whose maximum is 65,504, with one more exponent of small numbers
SCALERS = {"one scale, halved": FastLossScaler, "a constant scale": StaticLossScaler}
EARLY = ("patches.", "image_blocks.0.", "text_blocks.0.")  # prefixes of names
GRADIENTS = ("patches.weight", "image_blocks.0.mlp.branch.up.weight")


def overflow_trial(*, scaler: type[Any], lr: float, steps: int, **settings: Any) -> Result:
    """Return the loss, log2 of the scale, RMS_t and largest magnitudes of each step, the number of steps in which each
    tensor overflows, and the share of updates of tensors that overflows cost.

    Gradients of the linear layers and the patch embedding are rounded to `FP16`.
    """
    hooks: list[Any] = []

    def make_hooks(run: TrainState) -> list[Hook]:
        for name in ("patches.weight", "image_out.weight", "text_out.weight"):
            run.model.get_parameter(name).register_hook(partial(simulate_cast, format=FP16))
        scale, magnitudes = scaler(run), MagnitudeRecorder(run, *GRADIENTS)
        hooks.extend([OverflowRecorder(scale), magnitudes, RMSRecorder({PATCHES: GRADIENTS[0]}), scale])
        return hooks

    run, losses = train_clip(
        model=CLIP, optimizer=AdamWConfig(lr=lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.2), hooks=make_hooks,
        precision=SimulatedGradients(gradient_format=FP16), steps=steps, max_bad_steps=steps, **settings,
    )  # fmt: skip
    overflows, magnitudes, rms, _ = hooks
    tensors = len(run.parameters)
    lost = [tensors if names and scaler is FastLossScaler else len(names) for names in overflows.names]
    return {
        "loss": losses,
        "scale": overflows.scales,
        "overflows": Counter(name for names in overflows.names for name in names),
        "lost": sum(lost) / (tensors * steps),
        "rms": rms.values[PATCHES],
        "features": {f"block {i}": [x[i][1] for x in magnitudes.features] for i in (0, CLIP.depth - 1)},
        "gradients": {name: [largest for _, largest in x] for name, x in magnitudes.gradients.items()},
    }


def early_share(result: Result) -> float:
    """Return the share of overflows in the patch embedding and the first blocks; NaN without overflows."""
    early = [name.startswith(EARLY) for name in result["overflows"]]
    return float(np.average(early, weights=[*result["overflows"].values()])) if early else np.nan


def most_overflows(runs: Runs, count: int) -> str:
    """Name the tensors that overflow in most steps of all seeds."""
    totals = sum((Counter(result["overflows"]) for result in runs.results), Counter())
    return ", ".join(f"{name} ({steps})" for name, steps in totals.most_common(count)) or "none"


@experiment(
    "Most gradients that overflow in fp16 are in the patch embedding and the first blocks; a constant scale that skips "
    "only their tensors loses fewer updates than one scale that skips all",
    "Wortsman et al. 2023, App. G, Figure 21",
)
def loss_scale(folder: Path, quick: bool) -> Finding:
    """Name the tensors whose gradients overflow, and compare the share of updates that both scales lose.

    One scale is halved after an overflow and doubled by faster rules than PyTorch's, as runs are shorter. Both begin at
    65,536. A high learning rate and beta2 cause spikes.
    """
    seeds, steps, batch = (range(1), 6, 16) if quick else (range(3), 600, 128)
    grid = {name: {"scaler": scaler} for name, scaler in SCALERS.items()}
    sweep = Sweep(folder, overflow_trial, grid, seeds, steps=steps, batch=batch, lr=8e-3)
    halved, constant = sweep.runs.values()
    shares = np.array([early_share(result) for result in halved.results])
    lost = over_seeds(halved.values("lost") - constant.values("lost"), ".1%")
    first = halved.results[0]
    return sweep.finding(
        all_above([over_seeds(shares - 0.5, ".0%"), lost]),
        f"{over_seeds(shares, '.0%')} of the overflows are in the patch embedding and the first blocks of both towers. "
        f"One scale for all loses {lost} more of the updates. Most steps with overflow: {most_overflows(halved, 5)}.",
        ("scale",),
        {
            "loss": lambda runs: f"{runs.losses().mean():.3f}",
            "updates lost": lambda runs: f"{runs.mean('lost'):.1%}",
            "lowest log2 of the scale": lambda runs: f"{min(min(result['scale']) for result in runs.results):.0f}",
            "overflows (steps)": lambda runs: most_overflows(runs, 3),
        },
        {
            "loss, first seed": sweep.curves,
            "log2 of the scale, first seed": {
                name: list(enumerate(runs.results[0]["scale"])) for name, runs in sweep.runs.items()
            },
            "RMS_t of the patch embedding": {"first seed": list(enumerate(first["rms"]))},
            "largest features": {name: list(enumerate(values)) for name, values in first["features"].items()},
            "largest gradients": {name: list(enumerate(values)) for name, values in first["gradients"].items()},
        },
    )
