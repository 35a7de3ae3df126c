"""Appendix D: 16-bit Adam moments, 1-6-9 for the mean and 0-6-10 for the variance, do not raise the loss.

Six exponent bits cover the range of both moments; fp16's five do not. The variance is unsigned, and its running
value is clipped at 5. Embeddings, gains and biases keep 32-bit moments.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from limner.experiments.report import Finding
from limner.experiments.sweep import Result, TrialRunner
from limner.optim.optimizers import AdamW16Config, AdamWConfig

CLAIM = "Adam's moments in 16 bits, 1-6-9 and 0-6-10, train as well as in 32, with half of the memory"
SOURCE = "Ramesh et al. 2021, App. D"

_TOLERANCE = 0.005  # loss differences up to this size count as zero
_LAST = 50  # last steps whose loss is averaged


@dataclass(frozen=True, kw_only=True)
class MomentsSetting:
    """Settings of a small prior whose moments have `bits` bits."""

    bits: int
    seed: int
    steps: int
    width: int
    batch: int = 32
    lr: float = 3e-3


def trial(setting: MomentsSetting) -> Result:
    """Return the losses, the bytes of all moments, and the bytes of 16-bit moments."""
    from limner.experiments import tiny_prior

    optimizer: Any = (
        AdamW16Config(lr=setting.lr, betas=(0.9, 0.96), max_exp_avg_sq=5.0)
        if setting.bits == 16
        else AdamWConfig(lr=setting.lr, betas=(0.9, 0.96))
    )
    model = replace(tiny_prior.MODEL, width=setting.width)
    trained = tiny_prior.train(setting.steps, model=model, seed=setting.seed, optimizer=optimizer, batch=setting.batch)
    states = [state for optim in trained.run.optimizers for state in optim.state.values()]
    moments = [x for state in states for x in state.values() if torch.is_tensor(x) and x.ndim]
    return {
        "loss": trained.loss.tolist(),
        "held_out": tiny_prior.held_out_loss(trained.run.model),  # pyright: ignore[reportArgumentType]
        "bytes": sum(x.nbytes for x in moments),
        "bytes_16bit": sum(x.nbytes for x in moments if x.element_size() == 2),
    }


def reproduce(trials: TrialRunner, quick: bool) -> Finding:
    """Compare losses and bytes of 16-bit and 32-bit moments."""
    seeds, steps = range(1 if quick else 5), 20 if quick else 800
    width = 64 if quick else 128
    settings = [MomentsSetting(bits=bits, seed=seed, steps=steps, width=width) for bits in (32, 16) for seed in seeds]
    results = trials.run(trial, settings, "training priors")
    cells = {32: results[: len(seeds)], 16: results[len(seeds) :]}
    losses = {bits: np.array([np.mean(r["loss"][-_LAST:]) for r in runs]) for bits, runs in cells.items()}
    held_out = {bits: np.array([r["held_out"] for r in runs]) for bits, runs in cells.items()}
    gap = losses[16].mean() / losses[32].mean() - 1
    worst = max(np.abs(values[16] / values[32] - 1).max() for values in (losses, held_out))
    held_out_gap = held_out[16].mean() / held_out[32].mean() - 1
    full, half = cells[32][0]["bytes"], cells[16][0]["bytes"]
    matrices = 2 * cells[16][0]["bytes_16bit"]  # bytes in 32 bits
    rows = [
        (f"{bits} bits", f"{losses[bits].mean():.4f}", f"{losses[bits].std():.4f}", f"{held_out[bits].mean():.4f}",
         f"{cells[bits][0]['bytes'] / 2**20:.2f}")
        for bits in (32, 16)
    ]  # fmt: skip
    return Finding(
        name="sixteen-bit-moments",
        claim=CLAIM,
        source=SOURCE,
        holds=bool(max(abs(gap), abs(held_out_gap)) < _TOLERANCE and half < 0.6 * full),
        verdict=f"With moments of 16 bits the loss differs by {gap:+.2%} in training and {held_out_gap:+.2%} on "
        f"held-out scenes (means of {len(seeds)} seeds; at most {worst:.2%} for a single seed). Moments of matrices in "
        f"the blocks, {matrices / full:.0%} of all here, take half of their memory; all moments {half / full:.0%}.",
        header=("moments", "training loss", "deviation over seeds", "held-out loss", "moments, MiB"),
        rows=rows,
        curves={"loss, first seed": {f"{bits} bits": list(enumerate(runs[0]["loss"])) for bits, runs in cells.items()}},
        settings={"seeds": list(seeds), **{k: v for k, v in asdict(settings[0]).items() if k not in ("bits", "seed")}},
    )
