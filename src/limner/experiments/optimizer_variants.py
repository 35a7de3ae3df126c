"""Optimizers that Wortsman et al. 2023 compare with StableAdamW (§3.1, §3.5, Figure 14, App. F.1), in the set-up of
`spikes.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from limner.evaluation.confidence import Estimate
from limner.experiments.report import Finding, experiment
from limner.experiments.spikes import GPU, QUICK, SEEDS, SETTINGS, WINDOW, WORKERS
from limner.experiments.sweep import Result, Runs, Sweep, all_above, over_seeds, span
from limner.experiments.tiny_models import accuracy, resized_clip, train_clip
from limner.metrics.spikes import loss_spikes
from limner.models.contrastive import CLIPConfig
from limner.numerics.precision import Bf16, Fp32
from limner.optim.adam_base import StepTensors, adamw_
from limner.optim.optimizers import AdamWConfig, Beta2WarmupAdamWConfig, LionConfig, OptimizerConfig, StableAdamWConfig
from limner.optim.stable_adamw import StableAdamW

MARGIN = 0.01  # a smaller gain in accuracy counts as none
CHOICE_SEEDS = (20, 21)  # of the learning rates in `optimizers`
LR = 3 / 8 * SETTINGS["lr"]  # the rate of `spikes.py`, which causes spikes, is too high to compare accuracies


class MomentumRMSAdamW(StableAdamW):
    """`StableAdamW` with v_t^2, the square of the running mean of gradients, in the numerator of RMS_t (App. F.1)."""

    def _update(self, group: Mapping[str, Any], params: list[Tensor], inputs: StepTensors, counts: list[int]) -> None:
        coefficients, (beta1, beta2) = self.coefficients(group, counts), group["betas"]
        squares = [
            (m.lerp(g, 1 - beta1) / c1).square() / (u.lerp(g.square(), 1 - beta2) / c2).clamp_min(group["eps"] ** 2)
            for g, m, u, c1, c2 in zip(*inputs[1:4], coefficients.c1, coefficients.c2, strict=True)
        ]
        rms = torch.stack([square.mean() for square in squares]).sqrt()
        adamw_(inputs, group["lr"] / rms.clamp_min(1), coefficients, group["eps"], group["weight_decay"])


@dataclass(frozen=True, kw_only=True)
class MomentumRMSAdamWConfig(StableAdamWConfig):
    """`MomentumRMSAdamW`."""

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        return [MomentumRMSAdamW(self.groups(model), self.lr, self.betas, self.eps)]


@dataclass(frozen=True, kw_only=True)
class AdafactorConfig(StableAdamWConfig):
    """torch's AdaFactor (Shazeer & Stern 2018): factored second moments, no first moment, beta2 = 1 - t^-0.8, and
    updates relative to the size of a tensor."""

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adafactor(self.groups(model), lr=self.lr)]


@dataclass(frozen=True, kw_only=True)
class FrozenPatchesConfig(CLIPConfig):
    """CLIP whose patch embedding keeps its random initial weights (Chen et al. 2021)."""

    def build(self) -> Any:
        model = super().build()
        model.patches.requires_grad_(False)
        return model


def trial(
    *, optimizer: OptimizerConfig, width: int, depth: int, model: type[CLIPConfig] = CLIPConfig, **settings: Any
) -> Result:
    """Return the losses, the number of loss spikes, and the accuracy on held-out scenes."""
    run, losses = train_clip(
        model=model(**asdict(resized_clip(width, depth))), optimizer=optimizer, precision=Bf16() if GPU else Fp32(),
        device="cuda" if GPU else "cpu", **settings,
    )  # fmt: skip
    return {"loss": losses, "spikes": len(loss_spikes(np.array(losses), WINDOW)), "accuracy": accuracy(run.model)}


def sweep(folder: Path, quick: bool, grid: Mapping[Any, Mapping[str, Any]], seeds: Sequence[int] = SEEDS) -> Sweep:
    """Run the trials of a grid in the sizes of `spikes.py`."""
    settings = {key: value for key, value in (QUICK if quick else SETTINGS).items() if key not in ("lr", "beta2")}
    return Sweep(folder, trial, grid, seeds[:1] if quick else seeds, **settings, workers=WORKERS)


def adamw(beta2: float, lr: float = LR, config: type[AdamWConfig] | type[StableAdamWConfig] = AdamWConfig) -> Any:
    """Return an optimizer with the settings of §3.2."""
    return config(lr=lr, betas=(0.9, beta2), eps=1e-6, weight_decay=0.2)


def differences(key: str, spec: str, pairs: Sequence[tuple[Runs, Runs]]) -> list[Estimate]:
    """Return the mean differences over seeds of one value of the results."""
    return [over_seeds(more.values(key) - less.values(key), spec) for more, less in pairs]


COLUMNS: dict[str, Callable[[Runs], object]] = {
    "loss spikes": lambda runs: f"{runs.mean('spikes'):.1f}",
    "final loss": lambda runs: f"{runs.losses(40).mean():.3f}",
    "accuracy": lambda runs: f"{runs.mean('accuracy'):.1%}",
    "of seeds": lambda runs: span(runs.values("accuracy"), ".1%"),
}


@experiment(
    "The schedule beta2 = 1 - t^-lambda is not more accurate than a constant beta2; a too low beta2 slows training",
    "Wortsman et al. 2023, §3.3 and App. C.2, Figure 14",
)
def beta2_schedule(folder: Path, quick: bool) -> Finding:
    """Compare lambda 0.45, 0.5 and 0.65 with constants, of which the most accurate on other seeds is the reference."""
    constants, powers = (0.5, 0.99) if quick else (0.5, 0.9, 0.95, 0.99), (0.45, 0.5, 0.65)
    schedules = {p: Beta2WarmupAdamWConfig(lr=LR, power=p, eps=1e-6, weight_decay=0.2) for p in powers}
    grid = {("constant", beta2): {"optimizer": adamw(beta2)} for beta2 in constants}
    tried = sweep(folder, quick, grid, CHOICE_SEEDS).runs
    grid |= {("lambda", power): {"optimizer": config} for power, config in schedules.items()}
    results = sweep(folder, quick, grid)
    runs = results.runs
    best = runs[max(tried, key=lambda label: tried[label].mean("accuracy"))]
    reached = best.values("accuracy") + MARGIN
    gains = differences("accuracy", ".1%", [(runs["lambda", power], best) for power in powers])
    slower = over_seeds(runs["constant", constants[0]].losses(40) - best.losses(40), ".3f")
    steps = results.settings["steps"]
    last = {label: label[1] if label[0] == "constant" else 1 - steps ** -label[1] for label in grid}
    return results.finding(
        all_above([slower, *(over_seeds(reached - runs["lambda", p].values("accuracy"), ".1%") for p in powers)]),
        f"Accuracy, less that with a constant {best.label[1]}: "
        + ", ".join(f"{gain} with lambda {power}" for gain, power in zip(gains, powers, strict=True))
        + f" (up to {MARGIN:.0%} counts as none). With beta2 {constants[0]} the final loss is higher by {slower}.",
        ("beta2", "value"),
        {"last beta2": lambda runs: f"{last[runs.label]:.3f}", **COLUMNS},
        {
            "accuracy over the last beta2": {
                kind: sorted((last[label], runs[label].mean("accuracy")) for label in grid if label[0] == kind)
                for kind in ("constant", "lambda")
            },
            "loss, first seed": {f"{kind} {value}": runs[kind, value].curve for kind, value in grid},
        },
        window=WINDOW,
        **{"seeds that chose the constant": CHOICE_SEEDS},
    )


#: Optimizers by name, each as a function of the learning rate, with the ratio of its middle learning rate to `LR`.
OPTIMIZERS: dict[str, tuple[Callable[[float], OptimizerConfig], float]] = {
    "AdamW": (lambda lr: adamw(0.99, lr), 1.0),
    "StableAdamW": (lambda lr: adamw(0.99, lr, StableAdamWConfig), 1.0),
    "StableAdamW, v^2": (lambda lr: adamw(0.99, lr, MomentumRMSAdamWConfig), 1.0),
    "Lion": (lambda lr: LionConfig(lr=lr, weight_decay=1.2), 1 / 6),
    "AdaFactor": (lambda lr: AdafactorConfig(lr=lr), 5.0),
}


@experiment(
    "Small models learn best with Lion, then AdamW, then AdaFactor; v^2 in RMS_t is worse than g^2 in StableAdamW",
    "Wortsman et al. 2023, App. F.1",
)
def optimizers(folder: Path, quick: bool) -> Finding:
    """Compare accuracies, each with the best of three learning rates, a factor of two apart, by other seeds."""
    factors = (1.0,) if quick else (0.5, 1.0, 2.0)
    grid = {
        (name, f"{factor * ratio * LR:.2g}"): {"optimizer": build(factor * ratio * LR)}
        for name, (build, ratio) in OPTIMIZERS.items()
        for factor in factors
    }
    tried = sweep(folder, quick, grid, CHOICE_SEEDS).runs
    chosen = {label[0]: label for label in sorted(tried, key=lambda label: tried[label].mean("accuracy"))}
    results = sweep(folder, quick, {chosen[name]: grid[chosen[name]] for name in OPTIMIZERS}, SEEDS)
    best = {name: results.runs[chosen[name]] for name in OPTIMIZERS}
    order = ("Lion", "AdamW"), ("AdamW", "AdaFactor"), ("StableAdamW", "StableAdamW, v^2")
    gains = differences("accuracy", ".1%", [(best[better], best[worse]) for better, worse in order])
    return results.finding(
        all_above(gains),
        "Differences in accuracy: "
        + "; ".join(f"{better} less {worse} {gain}" for (better, worse), gain in zip(order, gains, strict=True))
        + ".",
        ("optimizer", "learning rate"),
        COLUMNS,
        {"loss at the best learning rate": {name: best[name].curve for name in OPTIMIZERS}},
        window=WINDOW,
        **{"seeds that chose learning rates": CHOICE_SEEDS},
    )


@experiment(
    "Clipping gradients at norm 2 leaves more loss spikes than at 1; freezing the patch embedding removes spikes",
    "Wortsman et al. 2023, §3.1, §3.5 (footnote 3) and App. G",
)
def spike_remedies(folder: Path, quick: bool) -> Finding:
    """Compare the numbers of spikes at a high beta2, and the accuracies."""
    methods = {
        "AdamW": {}, "clipped at 1": {"clip_norm": 1.0}, "clipped at 2": {"clip_norm": 2.0},
        "frozen patches": {"model": FrozenPatchesConfig},
    }  # fmt: skip
    grid = {name: {"optimizer": adamw(0.999, SETTINGS["lr"]), **method} for name, method in methods.items()}
    results = sweep(folder, quick, grid, range(10, 16))
    plain, clipped, loosely, frozen = results.runs.values()
    pairs = (loosely, clipped), (plain, frozen)
    spikes, gains = differences("spikes", ".1f", pairs), differences("accuracy", ".1%", pairs)
    return results.finding(
        all_above(spikes),
        f"Clipped at 2 instead of 1, a run has {spikes[0]} more spikes and {gains[0]} more accuracy; with a trained "
        f"instead of a frozen patch embedding, {spikes[1]} more spikes and {gains[1]} more accuracy.",
        ("method",),
        COLUMNS,
        {"loss, first seed": results.curves},
        window=WINDOW,
    )
