"""Runs with loss spikes, for the findings about stability.

Models of this size do not spike on noisy batches of many scenes. Two kinds of runs approximate the paper's setting of a
billion weights and batches of 16,384 pictures:

- *Few scenes, at a high learning rate.* A batch is a large share of `FEW_SCENES` scenes, or all of them. The loss falls
  fast, then spikes occasionally, without injected changes.
- *A new signal.* The blue channel contains only noise of one level, so u_t of its weights is small. At one step half
  of its pixels, in rows that repeat with the patches, brighten by `BRIGHTENING` permanently; at a later step the other
  half does. This injected change creates the paper's scenario: patch-embedding gradients for which u_t is far too
  small. The change is dim, so it barely affects the loss directly.

Shapes: B pictures in a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from limner.evaluation.report import Points
from limner.experiments.report import Finding, experiment
from limner.experiments.sweep import Result, Runs, Sweep, mean_and_error, span
from limner.experiments.tiny_models import CLIP, NUM_SCENES, accuracy, train_clip
from limner.metrics import spikes
from limner.metrics.spikes import SpikeMatch
from limner.objectives.hard_negatives import HardNegativeLoss
from limner.optim.optimizers import AdamWConfig, StableAdamWConfig
from limner.optim.schedules import Constant
from limner.training.hooks import Hook
from limner.training.rms_monitor import rms
from limner.training.train_state import TrainState

FEW_SCENES = 128
PATCHES, MIDDLE = "patches.weight", "image_blocks.1.attention.branch.qkv.weight"  # the middle: the later of two layers
WINDOW = 20  # steps of the running mean; the paper's 100 (in runs of 20,000) would span a large fall of the loss
BRIGHTENING = 38  # of 255, added to blue pixels
PATCH = 8

SEEDS = (10, 11, 12, 13, 14)  # disjoint from seeds 0 to 3, with which settings were chosen
SETTINGS = {"lr": 8e-3, "beta2": 0.999, "batch": 64, "width": 32, "steps": 400}
QUICK = {**SETTINGS, "steps": 40}


class RMSRecorder(Hook):
    """A hook that records RMS_t of `PATCHES` and `MIDDLE` in each step; 1 where RMS_t is undefined."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {PATCHES: [], MIDDLE: []}

    def before_step(self, run: TrainState) -> None:
        for series in self.values.values():
            series.append(1.0)

    def before_update(self, run: TrainState) -> None:
        values = dict(rms(run.optimizers))
        for name, series in self.values.items():
            if (value := values.get(run.model.get_parameter(name))) is not None:
                series[-1] = value.item()


class InjectedSignal:
    """The contrastive objective on pictures whose blue channel is noise. Half of its rows brighten at one step, the
    other half at a later one."""

    def __init__(self, steps: int, seed: int) -> None:
        self.rng = np.random.default_rng([3, seed])
        self.rows = self.rng.permutation([0, PATCH // 2])  # first brighter row within each patch
        window = 2 * steps // 10  # each window ends with steps to observe the effect
        self.onsets = [5 * steps // 10 + i * window + int(self.rng.integers(window * 3 // 4)) for i in range(2)]

    def change(self, step: int, pictures: UInt8[Tensor, "B 3 H W"]) -> UInt8[Tensor, "B 3 H W"]:
        """Return the pictures of a step, counted from 0."""
        blue = torch.from_numpy(self.rng.integers(127, 129, pictures[:, 2].shape, dtype=np.uint8))
        for onset, begin in zip(self.onsets, self.rows.tolist(), strict=True):
            if step >= onset:
                for row in range(begin, begin + PATCH // 2):
                    blue[:, row::PATCH] += BRIGHTENING
        return torch.cat([pictures[:, :2], blue[:, None]], 1)

    def __call__(self, model: Any, batch: dict[str, Tensor], step: int, generator: torch.Generator) -> Any:
        batch = {**batch, "pixels": self.change(step, batch["pixels"])}
        return HardNegativeLoss()(model, batch, step, generator)


def trial(
    *, lr: float, beta2: float, width: int, steps: int, seed: int, injected: bool = False,
    optimizer: type[AdamWConfig] | type[StableAdamWConfig] = AdamWConfig, **settings: Any,
) -> Result:  # fmt: skip
    """Return the loss and RMS_t of both tensors for each step, and the accuracy on held-out scenes.

    With `injected`, train with an `InjectedSignal` on all scenes, instead of on `FEW_SCENES`.
    """
    recorder, patch = RMSRecorder(), PATCH if injected else 4
    run, losses = train_clip(
        model=replace(CLIP, width=width, depth=2, embedding=width, patch=patch, patch_dropout=0.0, ln_pre=False),
        objective=InjectedSignal(steps, seed) if injected else HardNegativeLoss(),
        count=NUM_SCENES if injected else FEW_SCENES,
        optimizer=optimizer(lr=lr, betas=(0.9, beta2), eps=1e-8, weight_decay=0.2),
        steps=steps, seed=seed, warmup_steps=60, schedule=Constant(), hooks=lambda _: [recorder], **settings,
    )  # fmt: skip
    return {"loss": losses, "rms": recorder.values, "accuracy": accuracy(run.model)}


def count_spikes(runs: Runs) -> int:
    """Return the number of loss spikes of all seeds."""
    return sum(len(spikes.loss_spikes(np.array(result["loss"]), WINDOW)) for result in runs.results)


def grows(counts: Sequence[int]) -> bool:
    """Return True if the counts never fall, and the last exceeds the first."""
    return counts[-1] > counts[0] and all(a <= b for a, b in pairwise(counts))


@experiment(
    "Loss spikes grow with model size, batch size and learning rate, and shrink with a lower beta2",
    "Wortsman et al. 2023, §3.3, Figures 3, 12 and 13",
)
def loss_spikes(folder: Path, quick: bool) -> Finding:
    """Vary each of the three alone, at several beta2, on few scenes, and count the spikes of all seeds."""
    axes = {"width": (16, 32, 64), "batch": (32, 64, 128), "lr": (2e-3, 4e-3, 8e-3)}
    betas, seeds, settings = (0.9, 0.99, 0.999), SEEDS[:3], SETTINGS
    if quick:
        axes, betas, seeds, settings = {"lr": (2e-3, 8e-3)}, betas[1:], SEEDS[:1], QUICK
    grid = {(key, x, beta): {key: x, "beta2": beta} for key, values in axes.items() for x in values for beta in betas}
    sweep = Sweep(trial, grid, seeds, **settings).run(folder)
    counts = {label: count_spikes(runs) for label, runs in sweep.runs.items()}
    by_axis = {key: [counts[key, value, betas[-1]] for value in values] for key, values in axes.items()}
    by_beta = [sum(count for (*_, beta), count in counts.items() if beta == b) for b in betas]
    growing = {key: grows(values) for key, values in {**by_axis, "beta2": by_beta}.items()}
    grown, stable = (", ".join(key for key in growing if growing[key] is value) for value in (True, False))
    lowest_and_highest = {f"beta2 {b}": sweep.runs["lr", 8e-3, b].results[0]["loss"] for b in (betas[0], betas[-1])}
    return Finding(
        holds=all(growing.values()) if sum(by_beta) else None,
        verdict=f"At beta2 {betas[-1]}, from the lowest to the highest value: "
        + "; ".join(f"{key} {', '.join(map(str, by_axis[key]))} spikes" for key in axes)
        + f". With beta2 {', '.join(map(str, betas))}: {', '.join(map(str, by_beta))} spikes in all settings. "
        + f"Spikes grow with {grown or 'nothing'}" + f", not with {stable}." * bool(stable)
        + " No change is injected: batches are a large share of few scenes.",
        header=("varied", "value", *(f"spikes, beta2 {b}" for b in betas)),
        rows=[(key, x, *(counts[key, x, b] for b in betas)) for key, values in axes.items() for x in values],
        curves={
            f"Loss spikes over {key}": {f"beta2 {b}": [(x, counts[key, x, b]) for x in values] for b in betas}
            for key, values in axes.items()
        }
        | {"Loss": {name: list(enumerate(loss, 1)) for name, loss in lowest_and_highest.items()}},
        settings={**sweep.settings, "window": WINDOW},
    )  # fmt: skip


def pool(matches: Sequence[SpikeMatch]) -> SpikeMatch:
    """Merge the matches of several runs of equal length."""
    loss, rms, following = (
        [step for match in matches for step in getattr(match, name)] for name in ("loss", "rms", "following")
    )
    return SpikeMatch(loss, rms, following, float(np.mean([match.covered for match in matches])))


def patches_predict(patches: SpikeMatch, middle: SpikeMatch) -> bool | None:
    """Return True if RMS spikes of the patch embedding predict most loss spikes, beyond chance, and those of a middle
    layer do not. None with fewer than five loss spikes."""
    if len(patches.loss) < 5:
        return None
    predicts = [len(m.following) > len(m.loss) / 2 and m.p_value < 0.01 for m in (patches, middle)]
    return predicts == [True, False]


@experiment(
    "Loss spikes follow spikes of RMS_t in the patch embedding by 1 to 8 steps, but not those of a middle layer",
    "Wortsman et al. 2023, §3.4 and App. E, Figures 4 and 15 to 20",
)
def rms_predicts(folder: Path, quick: bool) -> Finding:
    """Measure the share of loss spikes that RMS spikes predict, and its p-value, in both kinds of runs.

    Spikes are detected by the paper's rules, with a shorter running mean. The share of loss spikes that follow an RMS
    spike is compared with the share of all steps that do, which is the chance level.
    """
    regimes: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
        "nothing injected": ({"batch": 128}, (0.95, 0.99, 0.999)),
        "a new signal injected": ({"injected": True, "lr": 4e-3}, (0.9, 0.98, 0.999)),
    }
    grid = {(name, beta): {**change, "beta2": beta} for name, (change, betas) in regimes.items() for beta in betas}
    sweep = Sweep(trial, grid, SEEDS[:1] if quick else SEEDS, **QUICK if quick else SETTINGS).run(folder)
    rows, verdicts, parts, curves = [], [], [], {}
    half = sweep.common["steps"] // 2
    for name, (_, betas) in regimes.items():
        matches: dict[str, list[SpikeMatch]] = {PATCHES: [], MIDDLE: []}
        for beta in betas:
            results = sweep.runs[name, beta].results
            for tensor, of_all in matches.items():
                of_beta = [
                    spikes.match_spikes(np.array(r["loss"]), np.array(r["rms"][tensor])[: len(r["loss"])], WINDOW)
                    for r in results
                ]
                of_all += of_beta
                match = pool(of_beta)
                highest = max(max(r["rms"][tensor][half:], default=1.0) for r in results)
                rows.append((name, beta, tensor, len(match.loss), len(match.rms), len(match.following),
                             f"{match.covered:.1%}", f"{match.p_value:.2g}", f"{highest:.1f}"))  # fmt: skip
        pooled = [pool(of_all) for of_all in matches.values()]
        verdicts.append(patches_predict(*pooled))
        in_patches, in_middle = (
            f"{len(match.following)} of {len(match.loss)} loss spikes follow one of {len(match.rms)} RMS spikes "
            f"(so many or more by chance: {match.p_value:.2g})"
            for match in pooled
        )
        parts.append(f"With {name}, {in_patches} in the patch embedding, {in_middle} in a middle layer.")
        curves |= curves_around_peak(name, results[-1])
    return Finding(
        # If one kind of runs has too few loss spikes, the other kind decides.
        holds=False not in verdicts if set(verdicts) != {None} else None,
        verdict=" ".join(parts),
        header=("runs", "beta2", "tensor", "loss spikes", "RMS spikes", "following", "steps that follow",
                "chance", "highest RMS_t"),
        rows=rows,
        curves=curves,
        settings=sweep.settings
        | {name: str(change) for name, (change, _) in regimes.items()}
        | {"window": WINDOW, "highest RMS_t": "in the second half of a run"},
    )  # fmt: skip


def curves_around_peak(name: str, result: Result) -> dict[str, dict[str, Points]]:
    """Return loss and RMS_t, 30 steps on each side of the highest RMS_t of patches in the second half of a run."""
    rms, loss = result["rms"], result["loss"]
    half = len(loss) // 2
    peak = half + int(np.argmax(rms[PATCHES][half:]))
    begin, end = max(0, peak - 30), peak + 30
    patches, middle, loss = (list(enumerate(x[begin:end], begin + 1)) for x in (rms[PATCHES], rms[MIDDLE], loss))
    return {f"Loss, {name}": {"loss": loss}, f"RMS_t, {name}": {"patch embedding": patches, "middle layer": middle}}


MARGIN = 2  # standard errors that a difference must exceed


def is_better(stable: int, adamw: int, differences: Mapping[str, tuple[float, float]]) -> bool | None:
    """Return True if StableAdamW has fewer spikes than AdamW and exceeds each other accuracy by `MARGIN` standard
    errors.

    False if StableAdamW has at least as many spikes, or is less accurate than another method by more than `MARGIN`.
    None otherwise, and if AdamW does not spike.
    """
    if not adamw:
        return None
    if stable >= adamw or any(mean < -MARGIN * error for mean, error in differences.values()):
        return False
    return True if all(mean > MARGIN * error for mean, error in differences.values()) else None


@experiment(
    "Update clipping removes loss spikes, and ends more accurate than gradient clipping or a lower beta2",
    "Wortsman et al. 2023, §3.5, Figure 5",
)
def stable_adamw(folder: Path, quick: bool) -> Finding:
    """Compare loss spikes, final loss and held-out accuracy of the methods per seed, on few scenes.

    A seed fixes the scenes, their order and the initial weights.
    """
    methods: dict[str, dict[str, Any]] = {
        "AdamW": {}, "gradient clipping": {"clip_norm": 1.0}, "StableAdamW": {"optimizer": StableAdamWConfig}
    }  # fmt: skip
    seeds, betas, settings = (SEEDS[:1], (0.9, 0.99), QUICK) if quick else (SEEDS, (0.9, 0.99, 0.999), SETTINGS)
    grid = {(name, beta): {**method, "beta2": beta} for name, method in methods.items() for beta in betas}
    sweep = Sweep(trial, grid, seeds, **settings).run(folder)
    at = 0.99  # beta2 of the left plot of Figure 5
    counts = {label: count_spikes(runs) for label, runs in sweep.runs.items()}
    accuracy = {label: runs.values("accuracy") for label, runs in sweep.runs.items()}
    clipping = "gradient clipping"
    others = {"AdamW": ("AdamW", at), clipping: (clipping, at), f"beta2 {betas[0]}": ("AdamW", betas[0])}
    stable = accuracy["StableAdamW", at]
    differences = {name: mean_and_error(stable - accuracy[label]) for name, label in others.items()}
    return sweep.finding(
        is_better(counts["StableAdamW", at], counts["AdamW", at], differences),
        f"At beta2 {at}, {counts['StableAdamW', at]} loss spikes with StableAdamW, {counts['AdamW', at]} with "
        f"AdamW and {counts['gradient clipping', at]} with gradient clipping; {counts['AdamW', betas[0]]} with "
        f"AdamW at beta2 {betas[0]}. Held-out accuracy of StableAdamW, less that of the others: "
        + ", ".join(f"{name} {mean:+.1%} ± {error:.1%}" for name, (mean, error) in differences.items())
        + " (standard errors over seeds). No change is injected: a batch is half of the scenes.",
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
