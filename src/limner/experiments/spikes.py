"""Runs with loss spikes, for the findings about stability, in the set-up of Wortsman et al. 2023, §3.2.

Patch dropout 0.5, a layer norm after the patch embedding, a warm-up for a quarter of the updates, then a cosine; eps
1e-6, weight decay 0.2, no gradient clipping except where compared. Batches are random ones of thousands of scenes,
whose captions nearly all differ.

The paper's models, batches and runs are far larger: up to ViT-H with 16,384 pictures for 20,000 updates. On a CPU the
trials of a finding take about 20 minutes on two cores. On a GPU the same command trains models of the size of ViT-B/32,
one trial at a time. With fewer than `MIN_SPIKES` loss spikes a finding is undecided, and the verdict says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from limner.evaluation.confidence import Estimate
from limner.evaluation.report import Points
from limner.experiments.report import Finding, experiment
from limner.experiments.sweep import Result, Runs, Sweep, all_above, over_seeds, span
from limner.experiments.tiny_models import CLIP, accuracy, train_clip
from limner.metrics import spikes
from limner.metrics.spikes import SpikeMatch
from limner.numerics.precision import Bf16, Fp32
from limner.optim.adam_base import rms
from limner.optim.optimizers import AdamWConfig, StableAdamWConfig
from limner.training.hooks import Hook
from limner.training.train_state import TrainState

GPU = torch.cuda.is_available()
WINDOW = 100 if GPU else 50  # steps of the running mean; in a shorter run, the loss falls far within 100 steps
MIN_SPIKES = 5  # fewer loss spikes decide nothing
TOO_FEW = f" Fewer than {MIN_SPIKES} loss spikes decide nothing: this scale cannot show the claim."
PATCHES, MIDDLE = "patch embedding", "middle layer"

SEEDS = (10, 11, 12, 13)  # disjoint from seeds 0 to 3, with which settings were chosen
#: Settings of all trials. The paper's learning rate is for widths near 1,000; narrow models train well with more.
SETTINGS: dict[str, Any] = (
    {"lr": 2e-3, "beta2": 0.999, "width": 768, "depth": 12, "batch": 512, "steps": 2_000, "count": 65_536}
    if GPU
    else {"lr": 8e-3, "beta2": 0.999, "width": 64, "depth": 2, "batch": 128, "steps": 600, "count": 16_384}
)
WORKERS = 1 if GPU else None  # trials at a time; None for one on each core
QUICK = {**SETTINGS, "width": 32, "depth": 2, "batch": 32, "steps": 40, "count": 1_024}


class RMSRecorder(Hook):
    """A hook that records RMS_t of the tensors in `names` in each step; 1 where RMS_t is undefined."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names
        self.values: dict[str, list[float]] = {label: [] for label in names}

    def before_step(self, run: TrainState) -> None:
        for series in self.values.values():
            series.append(1.0)

    def before_update(self, run: TrainState) -> None:
        values = dict(rms(run.optimizers))
        for label, name in self.names.items():
            if (value := values.get(run.model.get_parameter(name))) is not None:
                self.values[label][-1] = value.item()


def trial(
    *, lr: float, beta2: float, width: int, depth: int,
    optimizer: type[AdamWConfig] | type[StableAdamWConfig] = AdamWConfig, **settings: Any,
) -> Result:  # fmt: skip
    """Return the loss and RMS_t of both tensors for each step, and the accuracy on held-out scenes."""
    recorder = RMSRecorder(
        {PATCHES: "patches.weight", MIDDLE: f"image_blocks.{depth // 2}.attention.branch.qkv.weight"}
    )
    run, losses = train_clip(
        model=replace(CLIP, width=width, depth=depth, heads=max(2, width // 64), embedding=width),
        optimizer=optimizer(lr=lr, betas=(0.9, beta2), eps=1e-6, weight_decay=0.2),
        precision=Bf16() if GPU else Fp32(), device="cuda" if GPU else "cpu", hooks=lambda _: [recorder], **settings,
    )  # fmt: skip
    return {"loss": losses, "rms": recorder.values, "accuracy": accuracy(run.model)}


def count_spikes(runs: Runs) -> int:
    """Return the number of loss spikes of all seeds."""
    return sum(len(spikes.loss_spikes(np.array(result["loss"]), WINDOW)) for result in runs.results)


def grows(counts: Sequence[int]) -> bool | None:
    """Return True if the counts never fall, and the last exceeds the first. None with fewer than `MIN_SPIKES`."""
    if sum(counts) < MIN_SPIKES:
        return None
    return counts[-1] > counts[0] and all(a <= b for a, b in pairwise(counts))


@experiment(
    "Loss spikes grow with model size, batch size and learning rate, and shrink with a lower beta2",
    "Wortsman et al. 2023, §3.3, Figures 3, 12 and 13",
)
def loss_spikes(folder: Path, quick: bool) -> Finding:
    """Divide each of the three alone by 4, 2 and 1, at a low and a high beta2, and count the spikes of all seeds."""
    kinds, parts, betas, seeds, settings = (
        ({"lr": float}, (4, 1), (0.99, 0.999), SEEDS[:1], QUICK)
        if quick
        else ({"width": int, "batch": int, "lr": float}, (4, 2, 1), (0.9, 0.999), SEEDS[:3], SETTINGS)
    )
    axes = {key: [kind(settings[key] / part) for part in parts] for key, kind in kinds.items()}
    grid = {(key, x, beta): {key: x, "beta2": beta} for key, values in axes.items() for x in values for beta in betas}
    sweep = Sweep(folder, trial, grid, seeds, **settings, workers=WORKERS)
    counts = {label: count_spikes(runs) for label, runs in sweep.runs.items()}
    by_axis = {key: [counts[key, value, betas[-1]] for value in values] for key, values in axes.items()}
    by_beta = [sum(count for (*_, beta), count in counts.items() if beta == b) for b in betas]
    growing = [grows(values) for values in (*by_axis.values(), by_beta)]
    at_highest_lr = {f"beta2 {b}": sweep.runs["lr", settings["lr"], b].results[0]["loss"] for b in betas}
    return Finding(
        holds=False if False in growing else None if None in growing else True,
        verdict=f"At beta2 {betas[-1]}, from the lowest to the highest value: "
        + "; ".join(f"{key} {', '.join(map(str, by_axis[key]))} spikes" for key in axes)
        + f". With beta2 {', '.join(map(str, betas))}: {', '.join(map(str, by_beta))} spikes in all settings."
        + (TOO_FEW if set(growing) == {None} else ""),
        header=("varied", "value", *(f"spikes, beta2 {b}" for b in betas), f"accuracy, beta2 {betas[-1]}"),
        rows=[
            (key, x, *(counts[key, x, b] for b in betas), f"{sweep.runs[key, x, betas[-1]].mean('accuracy'):.1%}")
            for key, values in axes.items() for x in values
        ],
        curves={
            f"Loss spikes over {key}": {f"beta2 {b}": [(x, counts[key, x, b]) for x in values] for b in betas}
            for key, values in axes.items()
        }
        | {"Loss": {name: list(enumerate(loss, 1)) for name, loss in at_highest_lr.items()}},
        settings={**sweep.settings, "window": WINDOW},
    )  # fmt: skip


def pool(matches: Sequence[SpikeMatch]) -> SpikeMatch:
    """Merge the matches of several runs of equal length."""
    loss, rms, following = (
        [step for match in matches for step in getattr(match, name)] for name in ("loss", "rms", "following")
    )
    return SpikeMatch(loss, rms, following, float(np.mean([match.covered for match in matches])))


def match_rms(result: Result, tensor: str) -> SpikeMatch:
    """Match the loss spikes of a run with the RMS spikes of a tensor."""
    loss = np.array(result["loss"])
    return spikes.match_spikes(loss, np.array(result["rms"][tensor])[: len(loss)], WINDOW)


def patches_predict(patches: SpikeMatch, middle: SpikeMatch) -> bool | None:
    """Return True if RMS spikes of the patch embedding predict most loss spikes, beyond chance, and those of a middle
    layer do not. None with fewer than `MIN_SPIKES` loss spikes."""
    if len(patches.loss) < MIN_SPIKES:
        return None
    predicts = [len(m.following) > len(m.loss) / 2 and m.p_value < 0.01 for m in (patches, middle)]
    return predicts == [True, False]


@experiment(
    "Loss spikes follow spikes of RMS_t in the patch embedding by 1 to 8 steps, but not those of a middle layer",
    "Wortsman et al. 2023, §3.4 and App. E, Figures 4 and 15 to 20",
)
def rms_predicts(folder: Path, quick: bool) -> Finding:
    """Measure the share of loss spikes that RMS spikes predict, and its p-value, over several beta2.

    Spikes are detected by the paper's rules, with a shorter running mean on a CPU. The share of loss spikes that follow
    an RMS spike is compared with the share of all steps that do, which is the chance level.
    """
    seeds, settings = (SEEDS[:1], QUICK) if quick else (SEEDS, {**SETTINGS, "steps": 2 * SETTINGS["steps"]})
    sweep = Sweep(folder, trial, {b: {"beta2": b} for b in (0.95, 0.99, 0.999)}, seeds, workers=WORKERS, **settings)
    matches = {
        (beta, tensor): pool([match_rms(result, tensor) for result in runs.results])
        for beta, runs in sweep.runs.items()
        for tensor in (PATCHES, MIDDLE)
    }
    rows = []
    for (beta, tensor), match in matches.items():
        rms_values = [result["rms"][tensor][settings["steps"] // 2 :] for result in sweep.runs[beta].results]
        counts = len(match.loss), len(match.rms), len(match.following)
        highest = max(max(values, default=1.0) for values in rms_values)
        rows.append((beta, tensor, *counts, f"{match.covered:.1%}", f"{match.p_value:.2g}", f"{highest:.1f}"))
    pooled = {t: pool([match for (_, tensor), match in matches.items() if tensor == t]) for t in (PATCHES, MIDDLE)}
    holds = patches_predict(*pooled.values())
    return Finding(
        holds=holds,
        verdict="; ".join(
            f"{len(match.following)} of {len(match.loss)} loss spikes follow one of {len(match.rms)} RMS spikes of the "
            f"{tensor} (so many or more by chance: {match.p_value:.2g})"
            for tensor, match in pooled.items()
        )
        + f". Held-out accuracy at beta2 0.99: {sweep.runs[0.99].mean('accuracy'):.1%}."
        + (TOO_FEW if holds is None else ""),
        header=("beta2", "tensor", "loss spikes", "RMS spikes", "following", "steps that follow", "chance",
                "highest RMS_t"),
        rows=rows,
        curves=curves_around_peak(sweep.runs[0.999].results[-1]),
        settings=sweep.settings | {"window": WINDOW, "highest RMS_t": "in the second half of a run"},
    )  # fmt: skip


def curves_around_peak(result: Result) -> dict[str, dict[str, Points]]:
    """Return loss and RMS_t, 30 steps on each side of the highest RMS_t of patches in the second half of a run."""
    half = len(result["loss"]) // 2
    peak = half + int(np.argmax(result["rms"][PATCHES][half:]))
    begin, end = max(0, peak - 30), peak + 30
    series: dict[str, Points] = {name: list(enumerate(x[begin:end], begin + 1)) for name, x in result["rms"].items()}
    return {"Loss": {"loss": list(enumerate(result["loss"][begin:end], begin + 1))}, "RMS_t": series}


def is_better(stable: int, adamw: int, gains: Iterable[Estimate]) -> bool | None:
    """Return True if StableAdamW has fewer spikes than AdamW, and its gains in accuracy over other methods are above 0.

    False if it has at least as many spikes, or a gain below 0. None otherwise, and if AdamW has fewer than `MIN_SPIKES`
    spikes.
    """
    if adamw < MIN_SPIKES:
        return None
    return False if stable >= adamw else all_above(gains)


@experiment(
    "Update clipping removes loss spikes, and ends more accurate than gradient clipping or a lower beta2",
    "Wortsman et al. 2023, §3.5, Figure 5",
)
def stable_adamw(folder: Path, quick: bool) -> Finding:
    """Compare loss spikes, final loss and held-out accuracy of the methods per seed.

    A seed fixes the scenes, their order and the initial weights.
    """
    methods: dict[str, dict[str, Any]] = {
        "AdamW": {}, "gradient clipping": {"clip_norm": 1.0}, "StableAdamW": {"optimizer": StableAdamWConfig}
    }  # fmt: skip
    seeds, betas, settings = (SEEDS[:1], (0.9, 0.99), QUICK) if quick else (SEEDS, (0.9, 0.99, 0.999), SETTINGS)
    grid = {(name, beta): {**method, "beta2": beta} for name, method in methods.items() for beta in betas}
    sweep = Sweep(folder, trial, grid, seeds, **settings, workers=WORKERS)
    at = 0.99  # beta2 of the left plot of Figure 5
    counts = {label: count_spikes(runs) for label, runs in sweep.runs.items()}
    accuracy = {label: runs.values("accuracy") for label, runs in sweep.runs.items()}
    clipping = "gradient clipping"
    others = {"AdamW": ("AdamW", at), clipping: (clipping, at), f"beta2 {betas[0]}": ("AdamW", betas[0])}
    stable = accuracy["StableAdamW", at]
    gains = {name: over_seeds(stable - accuracy[label], "+.1%") for name, label in others.items()}
    return sweep.finding(
        is_better(counts["StableAdamW", at], counts["AdamW", at], gains.values()),
        f"At beta2 {at}, {counts['StableAdamW', at]} loss spikes with StableAdamW, {counts['AdamW', at]} with "
        f"AdamW and {counts['gradient clipping', at]} with gradient clipping; {counts['AdamW', betas[0]]} with "
        f"AdamW at beta2 {betas[0]}. Held-out accuracy of StableAdamW, less that of the others: "
        + "; ".join(f"{name} {gain}" for name, gain in gains.items())
        + f".{TOO_FEW if counts['AdamW', at] < MIN_SPIKES else ''}",
        ("method", "beta2"),
        {
            "loss spikes": lambda runs: counts[runs.label],
            "final loss": lambda runs: f"{runs.losses(40).mean():.3f}",
            "accuracy": lambda runs: f"{runs.mean('accuracy'):.1%}",
            "over seeds": lambda runs: span(runs.values("accuracy"), ".1%"),
        },
        {
            f"Loss, beta2 {at}": {m: list(enumerate(sweep.runs[m, at].results[0]["loss"], 1)) for m in methods},
            "Held-out accuracy over beta2": {m: [(b, accuracy[m, b].mean().item()) for b in betas] for m in methods},
        },
        window=WINDOW,
    )
