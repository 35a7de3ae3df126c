"""§3.4 and Appendix E: RMS_t of the patch embedding spikes 1 to 8 steps before the loss, not that of a middle layer.

Spikes are detected by the paper's rules, with a shorter running mean (`spike_sweep.py`), in runs at several beta2. The
share of loss spikes that follow an RMS spike is compared with the share of all steps that do, which is the chance
level. Runs are of both kinds: without injected changes, and with a new signal in the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np

from limner.experiments.report import Finding
from limner.experiments.spike_sweep import MIDDLE, PATCHES, QUICK, SEEDS, WINDOW, SpikeSetting, points, trial
from limner.experiments.sweep import Result, TrialRunner
from limner.metrics.spikes import SpikeMatch, match_spikes

CLAIM = "Loss spikes follow spikes of RMS_t in the patch embedding by 1 to 8 steps, but not those of a middle layer"
SOURCE = "Wortsman et al. 2023, §3.4 and App. E, Figures 4 and 15 to 20"

_REGIMES = {
    "nothing injected": (SpikeSetting(), (0.95, 0.99, 0.999)),
    "a new signal injected": (SpikeSetting(injected=True, batch=64, lr=4e-3), (0.9, 0.98, 0.999)),
}
_MIN_SPIKES = 5  # loss spikes needed for a verdict
_SIGNIFICANCE = 0.01
_CHART_STEPS = 30  # steps that a chart shows on each side


def reproduce(trials: TrialRunner, quick: bool) -> Finding:
    """Measure the share of loss spikes that RMS spikes predict, and its p-value."""
    seeds = SEEDS[:1] if quick else SEEDS
    runs = {
        name: [replace(base, beta2=b, seed=seed, steps=QUICK if quick else base.steps) for b in betas for seed in seeds]
        for name, (base, betas) in _REGIMES.items()
    }
    settings = [run for group in runs.values() for run in group]
    results = dict(zip(settings, trials.run(trial, settings, "training"), strict=True))
    rows, curves, verdicts, parts = [], {}, [], []
    for name, group in runs.items():
        patches, middle = (pool([_match(results[run], tensor) for run in group]) for tensor in (PATCHES, MIDDLE))
        verdicts.append(patches_predict(patches, middle))
        parts.append(f"With {name}, {_counts(patches)} in the patch embedding, {_counts(middle)} in a middle layer.")
        for beta in _REGIMES[name][1]:
            for tensor in (PATCHES, MIDDLE):
                selected = [run for run in group if run.beta2 == beta]
                match = pool([_match(results[run], tensor) for run in selected])
                highest = max(max(results[run]["rms"][tensor][run.steps // 2 :], default=1.0) for run in selected)
                rows.append((name, beta, tensor, len(match.loss), len(match.rms), len(match.following),
                             f"{match.covered:.1%}", f"{match.p_value:.2g}", f"{highest:.1f}"))  # fmt: skip
        curves |= _curves_around_peak(name, results[group[-1]])
    return Finding(
        name="rms-predicts",
        claim=CLAIM,
        source=SOURCE,
        # If one kind of runs has too few loss spikes, the other kind decides.
        holds=False not in verdicts if set(verdicts) != {None} else None,
        verdict=" ".join(parts),
        header=("runs", "beta2", "tensor", "loss spikes", "RMS spikes", "following", "steps that follow",
                "chance", "highest RMS_t"),
        rows=rows,
        curves=curves,
        settings={
            **{name: str(asdict(base)) for name, (base, _) in _REGIMES.items()},
            "seeds": list(seeds),
            "window": WINDOW,
            "highest RMS_t": "in the second half of a run",
        },
    )  # fmt: skip


def pool(matches: Sequence[SpikeMatch]) -> SpikeMatch:
    """Merge the matches of several runs of equal length."""
    return SpikeMatch(
        [step for match in matches for step in match.loss],
        [step for match in matches for step in match.rms],
        [step for match in matches for step in match.following],
        float(np.mean([match.covered for match in matches])),
    )


def patches_predict(patches: SpikeMatch, middle: SpikeMatch) -> bool | None:
    """Return True if RMS spikes of the patch embedding predict most loss spikes, beyond chance, and those of a middle
    layer do not. None with fewer than `_MIN_SPIKES` loss spikes."""
    if len(patches.loss) < _MIN_SPIKES:
        return None
    return _predicts(patches) and not _predicts(middle)


def _predicts(match: SpikeMatch) -> bool:
    return len(match.following) > len(match.loss) / 2 and match.p_value < _SIGNIFICANCE


def _match(result: Result, tensor: str) -> SpikeMatch:
    return match_spikes(np.array(result["loss"]), np.array(result["rms"][tensor])[: len(result["loss"])], WINDOW)


def _counts(match: SpikeMatch) -> str:
    return (
        f"{len(match.following)} of {len(match.loss)} loss spikes follow one of {len(match.rms)} RMS spikes (so many "
        f"or more by chance: {match.p_value:.2g})"
    )


def _curves_around_peak(name: str, result: Result) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return curves of loss and RMS_t around the highest patch-embedding RMS_t in the second half of a run."""
    rms, loss = result["rms"], result["loss"]
    middle = len(loss) // 2
    peak = middle + int(np.argmax(rms[PATCHES][middle:]))
    begin, end = max(0, peak - _CHART_STEPS), peak + _CHART_STEPS
    return {
        f"Loss, {name}": {"loss": points(loss[begin:end], begin + 1)},
        f"RMS_t, {name}": {
            "patch embedding": points(rms[PATCHES][begin:end], begin + 1),
            "middle layer": points(rms[MIDDLE][begin:end], begin + 1),
        },
    }
