"""§3.5: update clipping against gradient clipping and a lower beta2, in loss spikes, final loss and held-out accuracy.

Methods are compared per seed, with the same scenes, order and initial weights. Runs are those of `spike_sweep.py` on
few scenes, without injected changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np

from limner.experiments.report import Finding
from limner.experiments.spike_sweep import QUICK, SEEDS, WINDOW, Method, SpikeSetting, points, trial
from limner.experiments.sweep import Result, TrialRunner
from limner.metrics import spikes

CLAIM = "Update clipping removes loss spikes, and ends more accurate than gradient clipping or a lower beta2"
SOURCE = "Wortsman et al. 2023, §3.5, Figure 5"

_BASE = SpikeSetting(batch=64)
_METHODS: tuple[Method, ...] = ("AdamW", "gradient clipping", "StableAdamW")
_BETAS = (0.9, 0.99, 0.999)
_BETA2 = 0.99  # beta2 of the left plot of Figure 5
_MARGIN = 2  # standard errors that a difference must exceed
_LAST = 40  # last steps whose loss is averaged


def reproduce(trials: TrialRunner, quick: bool) -> Finding:
    """Compare spikes, final loss and accuracy of the methods per seed."""
    base = replace(_BASE, steps=QUICK) if quick else _BASE
    seeds, betas = (SEEDS[:1], _BETAS[:2]) if quick else (SEEDS, _BETAS)
    cells = {
        (method, beta): [replace(base, method=method, beta2=beta, seed=seed) for seed in seeds]
        for method in _METHODS
        for beta in betas
    }
    settings = [run for runs in cells.values() for run in runs]
    results_in_order = iter(trials.run(trial, settings, "training"))
    results = {cell: [next(results_in_order) for _ in runs] for cell, runs in cells.items()}
    counts = {cell: sum(_spikes(result) for result in runs) for cell, runs in results.items()}
    accuracies = {cell: [float(result["accuracy"]) for result in runs] for cell, runs in results.items()}
    stable: tuple[Method, float] = ("StableAdamW", _BETA2)
    alternatives: dict[str, tuple[Method, float]] = {
        "AdamW": ("AdamW", _BETA2),
        "gradient clipping": ("gradient clipping", _BETA2),
        f"beta2 {betas[0]}": ("AdamW", betas[0]),
    }
    rows = [
        (*cell, counts[cell], f"{np.mean([np.mean(r['loss'][-_LAST:]) for r in results[cell]]):.3f}",
         f"{np.mean(accuracies[cell]):.1%}", f"{min(accuracies[cell]):.1%} to {max(accuracies[cell]):.1%}")
        for cell in cells
    ]  # fmt: skip
    differences = {name: difference(accuracies[stable], accuracies[cell]) for name, cell in alternatives.items()}
    return Finding(
        name="stable-adamw",
        claim=CLAIM,
        source=SOURCE,
        holds=is_better(counts[stable], counts["AdamW", _BETA2], differences),
        verdict=f"At beta2 {_BETA2}, {counts[stable]} loss spikes with StableAdamW, {counts['AdamW', _BETA2]} with "
        f"AdamW and {counts['gradient clipping', _BETA2]} with gradient clipping; {counts['AdamW', betas[0]]} with "
        f"AdamW at beta2 {betas[0]}. Held-out accuracy of StableAdamW, less that of the others: "
        + ", ".join(f"{name} {mean:+.1%} ± {error:.1%}" for name, (mean, error) in differences.items())
        + " (standard errors over seeds). No change is injected: a batch is half of the scenes.",
        header=("method", "beta2", "loss spikes", "final loss", "accuracy", "over seeds"),
        rows=rows,
        curves={
            f"Loss, beta2 {_BETA2}": {method: points(results[method, _BETA2][0]["loss"]) for method in _METHODS},
            "Held-out accuracy over beta2": {
                method: [(b, float(np.mean(accuracies[method, b]))) for b in betas] for method in _METHODS
            },
        },
        settings={**asdict(base), "seed": list(seeds), "window": WINDOW},
    )


def difference(stable: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Return the mean difference of runs paired by seed, and its standard error (infinite for one pair)."""
    pairs = np.array(stable) - np.array(other)
    error = float(pairs.std(ddof=1)) / math.sqrt(len(pairs)) if len(pairs) > 1 else math.inf
    return float(pairs.mean()), error


def is_better(stable: int, adamw: int, differences: Mapping[str, tuple[float, float]]) -> bool | None:
    """Return True if StableAdamW has fewer spikes than AdamW and exceeds each other accuracy by `_MARGIN` standard
    errors.

    False if StableAdamW has at least as many spikes, or is less accurate than another method by more than `_MARGIN`.
    None otherwise, and if AdamW does not spike.
    """
    if not adamw:
        return None
    if stable >= adamw or any(mean < -_MARGIN * error for mean, error in differences.values()):
        return False
    return True if all(mean > _MARGIN * error for mean, error in differences.values()) else None


def _spikes(result: Result) -> int:
    return len(spikes.loss_spikes(np.array(result["loss"]), WINDOW))
