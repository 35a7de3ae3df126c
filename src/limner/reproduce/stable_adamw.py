"""§3.5: update clipping against gradient clipping and a lower beta2, in loss spikes, final loss and held-out accuracy.

Methods are compared per seed, with the same scenes, order and initial weights. Runs are those of `spike_sweep.py` on
few scenes, without injected changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np

from limner.metrics import spikes
from limner.reproduce.report import Finding
from limner.reproduce.spike_sweep import QUICK, SEEDS, WINDOW, Method, Setting, points, trial
from limner.reproduce.sweep import Result, Trials

CLAIM = "Update clipping removes loss spikes, and ends more accurate than gradient clipping or a lower beta2"
SOURCE = "Wortsman et al. 2023, §3.5, Figure 5"

_BASE = Setting(batch=64)
_METHODS: tuple[Method, ...] = ("AdamW", "gradient clipping", "StableAdamW")
_BETAS = (0.9, 0.99, 0.999)
_COMPARED = 0.99  # beta2 of the left plot of Figure 5
_ERRORS = 2  # standard errors that a difference must exceed
_LAST = 40  # last steps whose loss is averaged


def reproduce(trials: Trials, quick: bool) -> Finding:
    """Compare spikes, final loss and accuracy of the methods per seed."""
    base = replace(_BASE, steps=QUICK) if quick else _BASE
    seeds, betas = (SEEDS[:1], _BETAS[:2]) if quick else (SEEDS, _BETAS)
    cells = {
        (method, beta): [replace(base, method=method, beta2=beta, seed=seed) for seed in seeds]
        for method in _METHODS
        for beta in betas
    }
    settings = [run for runs in cells.values() for run in runs]
    found = iter(trials.run(trial, settings, "training"))
    results = {cell: [next(found) for _ in runs] for cell, runs in cells.items()}
    counts = {cell: sum(_spikes(result) for result in some) for cell, some in results.items()}
    right = {cell: [float(result["accuracy"]) for result in some] for cell, some in results.items()}
    ours: tuple[Method, float] = ("StableAdamW", _COMPARED)
    others: dict[str, tuple[Method, float]] = {
        "AdamW": ("AdamW", _COMPARED),
        "gradient clipping": ("gradient clipping", _COMPARED),
        f"beta2 {betas[0]}": ("AdamW", betas[0]),
    }
    rows = [
        (*cell, counts[cell], f"{np.mean([np.mean(r['loss'][-_LAST:]) for r in results[cell]]):.3f}",
         f"{np.mean(right[cell]):.1%}", f"{min(right[cell]):.1%} to {max(right[cell]):.1%}")
        for cell in cells
    ]  # fmt: skip
    against = {name: difference(right[ours], right[cell]) for name, cell in others.items()}
    return Finding(
        name="stable-adamw",
        claim=CLAIM,
        source=SOURCE,
        holds=judge(counts[ours], counts["AdamW", _COMPARED], against),
        verdict=f"At beta2 {_COMPARED}, {counts[ours]} loss spikes with StableAdamW, {counts['AdamW', _COMPARED]} with "
        f"AdamW and {counts['gradient clipping', _COMPARED]} with gradient clipping; {counts['AdamW', betas[0]]} with "
        f"AdamW at beta2 {betas[0]}. Held-out accuracy of StableAdamW, less that of the others: "
        + ", ".join(f"{name} {mean:+.1%} ± {error:.1%}" for name, (mean, error) in against.items())
        + " (standard errors over seeds). Nothing is injected: batches are half of few scenes.",
        header=("method", "beta2", "loss spikes", "final loss", "accuracy", "over seeds"),
        rows=rows,
        curves={
            f"Loss, beta2 {_COMPARED}": {method: points(results[method, _COMPARED][0]["loss"]) for method in _METHODS},
            "Held-out accuracy over beta2": {
                method: [(b, float(np.mean(right[method, b]))) for b in betas] for method in _METHODS
            },
        },
        settings={**asdict(base), "seed": list(seeds), "window": WINDOW},
    )


def difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Return the mean difference of runs paired by seed, and its standard error (infinite for one pair)."""
    pairs = np.array(ours) - np.array(theirs)
    error = float(pairs.std(ddof=1)) / math.sqrt(len(pairs)) if len(pairs) > 1 else math.inf
    return float(pairs.mean()), error


def judge(ours: int, adamw: int, against: Mapping[str, tuple[float, float]]) -> bool | None:
    """Return True if StableAdamW has fewer spikes than AdamW and exceeds each other accuracy by `_ERRORS` standard
    errors.

    False if StableAdamW has at least as many spikes, or is less accurate than another method by more than `_ERRORS`.
    None otherwise, and if AdamW does not spike.
    """
    if not adamw:
        return None
    if ours >= adamw or any(mean < -_ERRORS * error for mean, error in against.values()):
        return False
    return True if all(mean > _ERRORS * error for mean, error in against.values()) else None


def _spikes(result: Result) -> int:
    return len(spikes.loss_spikes(np.array(result["loss"]), WINDOW))
