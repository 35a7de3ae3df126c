"""§3.4 and Appendix E: RMS_t of the patch embedding spikes 1 to 8 steps before the loss, not that of a middle layer.

Spikes are detected by the paper's rules, with a shorter running mean (`spike_sweep.py`), in runs at several beta2. The
share of loss spikes that follow an RMS spike is compared with the share of all steps that do, which is the chance
level. Runs are of both kinds: without injected changes, and with a new signal in the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np

from limner.metrics.spikes import SpikeMatch, match_spikes
from limner.reproduce.report import Finding
from limner.reproduce.spike_sweep import MIDDLE, PATCHES, QUICK, SEEDS, WINDOW, Setting, points, trial
from limner.reproduce.sweep import Result, Trials

CLAIM = "Loss spikes follow spikes of RMS_t in the patch embedding by 1 to 8 steps, but not those of a middle layer"
SOURCE = "Wortsman et al. 2023, §3.4 and App. E, Figures 4 and 15 to 20"

_REGIMES = {
    "nothing injected": (Setting(), (0.95, 0.99, 0.999)),
    "a new signal injected": (Setting(injected=True, batch=64, lr=4e-3), (0.9, 0.98, 0.999)),
}
_FEW = 5  # loss spikes needed for a verdict
_CHANCE = 0.01  # significance level
_AROUND = 30  # steps that a chart shows on each side


def reproduce(trials: Trials, quick: bool) -> Finding:
    """Measure the share of loss spikes that RMS spikes predict, and its p-value."""
    seeds = SEEDS[:1] if quick else SEEDS
    runs = {
        name: [replace(base, beta2=b, seed=seed, steps=QUICK if quick else base.steps) for b in betas for seed in seeds]
        for name, (base, betas) in _REGIMES.items()
    }
    settings = [run for some in runs.values() for run in some]
    results = dict(zip(settings, trials.run(trial, settings, "training"), strict=True))
    rows, curves, judged, said = [], {}, [], []
    for name, some in runs.items():
        patches, middle = (pooled([_foreseen(results[run], tensor) for run in some]) for tensor in (PATCHES, MIDDLE))
        judged.append(judge(patches, middle))
        said.append(f"With {name}, {_said(patches)} in the patch embedding, and {_said(middle)} in a middle layer.")
        for beta in _REGIMES[name][1]:
            for tensor in (PATCHES, MIDDLE):
                these = [run for run in some if run.beta2 == beta]
                found = pooled([_foreseen(results[run], tensor) for run in these])
                highest = max(max(results[run]["rms"][tensor][run.steps // 2 :], default=1.0) for run in these)
                rows.append((name, beta, tensor, len(found.loss), len(found.rms), len(found.following),
                             f"{found.covered:.1%}", f"{found.p_value:.2g}", f"{highest:.1f}"))  # fmt: skip
        curves |= _shown(name, results[some[-1]])
    return Finding(
        name="rms-predicts",
        claim=CLAIM,
        source=SOURCE,
        # If one kind of runs has too few loss spikes, the other kind decides.
        holds=None if all(one is None for one in judged) else all(one is not False for one in judged),
        verdict=" ".join(said),
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


def pooled(found: Sequence[SpikeMatch]) -> SpikeMatch:
    """Merge the matches of several runs of equal length."""
    return SpikeMatch(
        [step for one in found for step in one.loss],
        [step for one in found for step in one.rms],
        [step for one in found for step in one.following],
        float(np.mean([one.covered for one in found])),
    )


def judge(patches: SpikeMatch, middle: SpikeMatch) -> bool | None:
    """Return True if RMS spikes of the patch embedding predict most loss spikes, beyond chance, and those of a middle
    layer do not. None with fewer than `_FEW` loss spikes."""
    if len(patches.loss) < _FEW:
        return None
    return _predicts(patches) and not _predicts(middle)


def _predicts(found: SpikeMatch) -> bool:
    return len(found.following) > len(found.loss) / 2 and found.p_value < _CHANCE


def _foreseen(result: Result, tensor: str) -> SpikeMatch:
    return match_spikes(np.array(result["loss"]), np.array(result["rms"][tensor])[: len(result["loss"])], WINDOW)


def _said(found: SpikeMatch) -> str:
    return (
        f"{len(found.following)} of {len(found.loss)} loss spikes follow one of {len(found.rms)} RMS spikes (so many "
        f"or more by chance: {found.p_value:.2g})"
    )


def _shown(name: str, result: Result) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return curves of loss and RMS_t around the highest patch-embedding RMS_t in the second half of a run."""
    rms, loss = result["rms"], result["loss"]
    middle = len(loss) // 2
    at = middle + int(np.argmax(rms[PATCHES][middle:]))
    begin, end = max(0, at - _AROUND), at + _AROUND
    return {
        f"Loss, {name}": {"loss": points(loss[begin:end], begin + 1)},
        f"RMS_t, {name}": {
            "patch embedding": points(rms[PATCHES][begin:end], begin + 1),
            "middle layer": points(rms[MIDDLE][begin:end], begin + 1),
        },
    }
