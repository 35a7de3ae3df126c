"""Appendix D: 16-bit Adam moments, 1-6-9 for the mean and 0-6-10 for the variance, do not raise the loss.

Six exponent bits cover the range of both moments; fp16's five do not. The variance is unsigned, and its running
value is clipped at 5. Embeddings, gains and biases keep 32-bit moments.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from limner.optim.optimizers import AdamW16Config, AdamWConfig
from limner.reproduce.report import Finding
from limner.reproduce.sweep import Result, Trials

CLAIM = "Adam's moments in 16 bits, 1-6-9 and 0-6-10, train as well as in 32, with half of the memory"
SOURCE = "Ramesh et al. 2021, App. D"

_GAP = 0.005  # loss differences up to this size count as zero
_LAST = 50  # last steps whose loss is averaged


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a small prior whose moments have `bits` bits."""

    bits: int
    seed: int
    steps: int
    width: int
    batch: int = 32
    lr: float = 3e-3


def trial(of: Training) -> Result:
    """Return the losses, the bytes of all moments, and the bytes of 16-bit moments."""
    from limner.reproduce import tiny_prior

    kind: Any = (
        AdamW16Config(lr=of.lr, betas=(0.9, 0.96), max_exp_avg_sq=5.0)
        if of.bits == 16
        else AdamWConfig(lr=of.lr, betas=(0.9, 0.96))
    )
    model = replace(tiny_prior.MODEL, width=of.width)
    trained = tiny_prior.train(of.steps, model=model, seed=of.seed, optimizer=kind, batch=of.batch)
    states = [state for optimizer in trained.run.optimizers for state in optimizer.state.values()]
    moments = [x for state in states for x in state.values() if torch.is_tensor(x) and x.ndim]
    return {
        "loss": trained.loss.tolist(),
        "held_out": tiny_prior.held_out_loss(trained.run.model),  # pyright: ignore[reportArgumentType]
        "bytes": sum(x.nbytes for x in moments),
        "packed": sum(x.nbytes for x in moments if x.element_size() == 2),
    }


def reproduce(trials: Trials, quick: bool) -> Finding:
    """Compare losses and bytes of 16-bit and 32-bit moments."""
    seeds, steps = range(1 if quick else 5), 20 if quick else 800
    width = 64 if quick else 128
    settings = [Training(bits=bits, seed=seed, steps=steps, width=width) for bits in (32, 16) for seed in seeds]
    results = trials.run(trial, settings, "training priors")
    found = {32: results[: len(seeds)], 16: results[len(seeds) :]}
    losses = {bits: np.array([np.mean(r["loss"][-_LAST:]) for r in some]) for bits, some in found.items()}
    held_out = {bits: np.array([r["held_out"] for r in some]) for bits, some in found.items()}
    gap = losses[16].mean() / losses[32].mean() - 1
    worst = max(np.abs(values[16] / values[32] - 1).max() for values in (losses, held_out))
    held_gap = held_out[16].mean() / held_out[32].mean() - 1
    full, half = found[32][0]["bytes"], found[16][0]["bytes"]
    matrices = 2 * found[16][0]["packed"]  # bytes in 32 bits
    rows = [
        (f"{bits} bits", f"{losses[bits].mean():.4f}", f"{losses[bits].std():.4f}", f"{held_out[bits].mean():.4f}",
         f"{found[bits][0]['bytes'] / 2**20:.2f}")
        for bits in (32, 16)
    ]  # fmt: skip
    return Finding(
        name="sixteen-bit-moments",
        claim=CLAIM,
        source=SOURCE,
        holds=bool(max(abs(gap), abs(held_gap)) < _GAP and half < 0.6 * full),
        verdict=f"With moments of 16 bits the loss differs by {gap:+.2%} in training and {held_gap:+.2%} on fresh "
        f"scenes (means of {len(seeds)} seeds; of a single seed by {worst:.2%} at most). Moments of matrices in the "
        f"blocks, {matrices / full:.0%} of all here, take half of their memory; all moments take {half / full:.0%}.",
        header=("moments", "training loss", "its deviation over seeds", "loss on fresh scenes", "moments, MiB"),
        rows=rows,
        curves={"loss, first seed": {f"{bits} bits": list(enumerate(some[0]["loss"])) for bits, some in found.items()}},
        settings={"seeds": list(seeds), **{k: v for k, v in asdict(settings[0]).items() if k not in ("bits", "seed")}},
    )
