"""§3.3: more loss spikes with larger models, larger batches and higher learning rates, fewer with a lower beta2.

Each of the three is varied alone, at several beta2, and spikes are summed over seeds. Runs are those of
`spike_sweep.py` on few scenes, without injected changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np

from limner.experiments.report import Finding
from limner.experiments.spike_sweep import QUICK, SEEDS, WINDOW, SpikeSetting, points, trial
from limner.experiments.sweep import TrialRunner
from limner.metrics import spikes

CLAIM = "Loss spikes grow with model size, batch size and learning rate, and shrink with a lower beta2"
SOURCE = "Wortsman et al. 2023, §3.3, Figures 3, 12 and 13"

_BASE = SpikeSetting(batch=64)
_AXES = {"width": (16, 32, 64), "batch": (32, 64, 128), "lr": (2e-3, 4e-3, 8e-3)}
_BETAS = (0.9, 0.99, 0.999)
_SEEDS = SEEDS[:3]


def reproduce(trials: TrialRunner, quick: bool) -> Finding:
    """Count the spikes of all seeds, along each axis and for each beta2."""
    base = replace(_BASE, steps=QUICK) if quick else _BASE
    axes = {"lr": (2e-3, 8e-3)} if quick else _AXES
    betas, seeds = (_BETAS[1:], _SEEDS[:1]) if quick else (_BETAS, _SEEDS)
    cells = {(key, value, beta): _runs(base, key, value, beta, seeds) for key in axes for value in axes[key]
             for beta in betas}  # fmt: skip
    settings = list(dict.fromkeys(run for runs in cells.values() for run in runs))  # all three axes include the base
    results = dict(zip(settings, trials.run(trial, settings, "training"), strict=True))
    counts = {
        cell: sum(len(spikes.loss_spikes(np.array(results[run]["loss"]), WINDOW)) for run in runs)
        for cell, runs in cells.items()
    }
    by_axis = {key: [counts[key, value, betas[-1]] for value in axes[key]] for key in axes}
    by_beta = [sum(count for (*_, beta), count in counts.items() if beta == b) for b in betas]
    growing = spikes_grow(by_axis, by_beta)
    rows = [(key, value, *(counts[key, value, b] for b in betas)) for key in axes for value in axes[key]]
    curves = {
        f"Loss spikes over {key}": {
            f"beta2 {b}": [(value, counts[key, value, b]) for value in axes[key]] for b in betas
        }
        for key in axes
    }
    charted = [replace(base, beta2=b, seed=seeds[0]) for b in (betas[0], betas[-1])]
    curves |= {"Loss": {f"beta2 {run.beta2}": points(results[run]["loss"]) for run in charted if run in results}}
    return Finding(
        name="loss-spikes",
        claim=CLAIM,
        source=SOURCE,
        holds=all(growing.values()) if sum(by_beta) else None,
        verdict=f"At beta2 {betas[-1]}, from the lowest to the highest value: "
        + "; ".join(f"{key} {', '.join(map(str, by_axis[key]))} spikes" for key in axes)
        + f". With beta2 {', '.join(map(str, betas))}: {', '.join(map(str, by_beta))} spikes in all settings. "
        + _describe(growing)
        + " No change is injected: batches are a large share of few scenes.",
        header=("varied", "value", *(f"spikes, beta2 {b}" for b in betas)),
        rows=rows,
        curves=curves,
        settings={**asdict(base), "seed": list(seeds), "window": WINDOW},
    )


def _runs(base: SpikeSetting, key: str, value: float, beta: float, seeds: Sequence[int]) -> list[SpikeSetting]:
    changed: Mapping[str, float] = {key: value}
    return [replace(base, beta2=beta, seed=seed, **changed) for seed in seeds]


def spikes_grow(by_axis: Mapping[str, Sequence[int]], by_beta: Sequence[int]) -> dict[str, bool]:
    """Return for each axis, and beta2, if spikes grow: the counts never fall, and the last exceeds the first.

    Args:
        by_axis: spike counts of each axis at the highest beta2, from the smallest value up.
        by_beta: spike counts of each beta2, from the lowest up.
    """
    return {key: _grows(counts) for key, counts in {**by_axis, "beta2": by_beta}.items()}


def _grows(counts: Sequence[int]) -> bool:
    return counts[-1] > counts[0] and all(a <= b for a, b in pairwise(counts))


def _describe(growing: Mapping[str, bool]) -> str:
    grown, stable = ([key for key, grows in growing.items() if grows is value] for value in (True, False))
    return f"Spikes grow with {', '.join(grown) or 'nothing'}" + (f", not with {', '.join(stable)}." * bool(stable))
