"""Variants of the dVAE that Ramesh et al. 2021 compare (§2.1, App. A): relaxation, KL weight, pooling and density.

The pictures are crops of crowded scenes with normal noise. Noise bounds the learned scale ln b from below; without it
flat areas dominate the likelihood. A token stands for 4 x 4 pixels, 48 values instead of the paper's 192. The objective
therefore divides beta by 4, so that the KL has the paper's weight per value. The reported ELB is in nats per value,
with weight 1 of the KL.

Shapes: N pictures, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.distributions import Laplace, Normal

from limner.evaluation.reconstruction import psnr
from limner.experiments.report import Finding, experiment
from limner.experiments.sweep import Result, Runs, Sweep, all_above, over_seeds, span
from limner.experiments.tiny_models import train_in_memory
from limner.metrics.codebook import usage
from limner.models.dvae import DVAE, DVAEConfig, map_pixels
from limner.objectives.codebook_elbo import one_hot
from limner.objectives.elbo import RelaxedELB, gumbel_softmax, kl_to_uniform
from limner.optim.schedules import Anneal
from limner.tasks.rendering import render
from limner.tasks.scenes import sample_dense_scene

MODEL = DVAEConfig(
    size=16, width=16, groups=3, blocks=1, vocab=64, code_width=32, gain=0.5, init_gain=2**0.5, code_gain=3.0
)
NOISE = 16  # standard deviation of the noise of pictures, of 255
TAU, BETA = 1 / 16, 6.6  # the paper's last values
SEEDS, SETTINGS = range(8), {"steps": 300, "batch": 32, "lr": 1e-2}
QUICK = {**SETTINGS, "steps": 8, "batch": 8}


class LinearAnneal(Anneal):
    """A quantity annealed along a line."""

    def __call__(self, step: int) -> float:
        return self.start + (self.end - self.start) * min(1.0, step / max(1, self.steps))


class LaplaceELB(RelaxedELB):
    """The bound with a Laplace density of pixels: their absolute error, with a learned scale."""

    density: ClassVar[type[Laplace] | type[Normal]] = Laplace

    def nll(
        self, x: Float[Tensor, "N 3 H W"], mu: Float[Tensor, "N 3 H W"], log_b: Float[Tensor, "N 3 H W"]
    ) -> Float[Tensor, "N 3 H W"]:
        return -self.density(mu.sigmoid(), log_b.exp(), validate_args=False).log_prob(x)

    def mass_outside(self, mu: Float[Tensor, "N 3 H W"], log_b: Float[Tensor, "N 3 H W"]) -> Float[Tensor, ""]:
        """Return the mean probability of values outside (0, 1)."""
        density = self.density(mu.sigmoid(), log_b.exp(), validate_args=False)
        return (1 - density.cdf(torch.ones_like(mu)) + density.cdf(torch.zeros_like(mu))).mean()


class GaussianELB(LaplaceELB):
    """The bound with a normal density of pixels: their squared error, with a learned scale."""

    density = Normal


@cache
def pictures(count: int, seed: int) -> UInt8[Tensor, "N 3 H W"]:
    """Return crops of crowded scenes with noise."""
    drawn = []
    for i in range(count):
        rng = np.random.default_rng([seed, i])
        picture = render(sample_dense_scene(rng), 24)[4:20, 4:20]
        drawn.append((picture + rng.normal(0, NOISE, picture.shape)).round().clip(0, 255).astype(np.uint8))
    return torch.from_numpy(np.stack(drawn)).permute(0, 3, 1, 2).contiguous()


def trial(
    *, seed: int, steps: int, beta: float = BETA, tau: float = TAU, schedule: type[Anneal] = Anneal,
    objective: type[RelaxedELB] = RelaxedELB, pool: type[nn.Module] = nn.MaxPool2d, **settings: Any,
) -> Result:  # fmt: skip
    """Return the losses and `evaluate`. tau falls to its last value in half of the steps, beta grows in a tenth."""
    torch.manual_seed(seed)
    model = MODEL.build()
    for group in (child for child in model.encoder.modules() if hasattr(child, "pool")):
        group.pool = pool(2)
    bound = objective(
        beta=Anneal(start=0, end=beta / 4, steps=steps // 10), tau=schedule(start=1, end=tau, steps=steps // 2)
    )
    run, losses = train_in_memory(model, bound, {"pixels": pictures(1_024, 0)}, seed=seed, steps=steps, **settings)
    return {"loss": losses, **evaluate(model.eval(), bound, run.step)}


@torch.no_grad()
def evaluate(model: DVAE, objective: RelaxedELB, step: int) -> Result:
    """Return both negative bounds on held-out pictures, PSNR and perplexity of argmax codes, and the probability of
    values outside (0, 1). The argmax of a relaxed sample is a sample of q, so both bounds use the same noise."""
    pixels, generator = pictures(512, 1), torch.Generator().manual_seed(0)
    logits, x = model.encode(pixels), map_pixels(pixels)
    kl = kl_to_uniform(logits.log_softmax(1)).mean() / pixels[0].numel()
    z = gumbel_softmax(logits, objective.tau(step), generator)
    relaxed, true = ((objective.nll(x, *model.decode(codes)).mean() + kl).item() for codes in (z, one_hot(z)))
    tokens = model.tokenize(pixels)
    outside = objective.mass_outside(*model.decode(one_hot(z))).item() if isinstance(objective, LaplaceELB) else 0.0
    return {
        "relaxed": relaxed, "true": true, "gap": true - relaxed, "outside": outside,
        "psnr": psnr(pixels, model.decode_tokens(tokens)).mean().item(),
        "perplexity": usage(tokens, MODEL.vocab)["perplexity"].item(),
    }  # fmt: skip


def sweep(folder: Path, quick: bool, grid: dict[Any, dict[str, Any]]) -> Sweep:
    """Run the trials of a grid."""
    return Sweep(folder, trial, grid, SEEDS[:1] if quick else SEEDS, **(QUICK if quick else SETTINGS))


COLUMNS: dict[str, Callable[[Runs], object]] = {
    "negative ELB": lambda runs: f"{runs.mean('true'):.3f}",
    "of seeds": lambda runs: span(runs.values("true"), ".3f"),
    "PSNR, dB": lambda runs: f"{runs.mean('psnr'):.2f}",
    "perplexity of codes": lambda runs: f"{runs.mean('perplexity'):.1f}",
}


def closes(wide: Float[np.ndarray, " S"], narrow: Float[np.ndarray, " S"]) -> bool | None:
    """Return True if the wide gap is above 0, and the narrow gap's magnitude below a tenth of it."""
    return all_above([over_seeds(wide), over_seeds(wide / 10 - np.abs(narrow))])


@experiment(
    "Annealing tau to 1/16 closes the gap between the relaxed and the true ELB on held-out pictures",
    "Ramesh et al. 2021, §2.1",
)
def tau_gap(folder: Path, quick: bool) -> Finding:
    """Compare both bounds over the last tau. The gap is closed if it is below a tenth of the gap at tau = 1."""
    taus = (1, TAU) if quick else (1, 1 / 4, TAU)
    results = sweep(folder, quick, {str(Fraction(tau)): {"tau": tau} for tau in taus})
    wide, *_, narrow = (runs.values("gap") for runs in results.runs.values())
    return results.finding(
        closes(wide, narrow),
        f"Relaxed less true ELB, in nats per value: {over_seeds(wide)} at tau 1, {over_seeds(narrow)} at tau 1/16.",
        ("last tau",),
        COLUMNS | {"relaxed - true ELB": lambda runs: str(over_seeds(runs.values("gap")))},
        {"loss, first seed": results.curves},
    )


@experiment(
    "A KL weight beta of 6.6 instead of 1 uses more of the codebook, and ends with a smaller reconstruction error",
    "Ramesh et al. 2021, §2.1",
)
def kl_weight(folder: Path, quick: bool) -> Finding:
    """Compare perplexity of the codes and PSNR of argmax reconstructions over beta."""
    results = sweep(folder, quick, {beta: {"beta": beta} for beta in ((1, BETA) if quick else (1, BETA, 4 * BETA))})
    first, last = results.runs[1], results.runs[BETA]
    codes, quality = (over_seeds(last.values(key) - first.values(key), ".2f") for key in ("perplexity", "psnr"))
    return results.finding(
        all_above([codes, quality]),
        f"With beta 6.6 instead of 1 the perplexity of the codes differs by {codes} and the PSNR by "
        f"{quality} dB. The objective divides beta by 4, since a token has 48 values, in the paper 192.",
        ("beta",),
        COLUMNS,
        {
            f"{key}, over beta": {"mean of seeds": [(beta, runs.mean(key)) for beta, runs in results.runs.items()]}
            for key in ("perplexity", "psnr")
        },
    )


def diverged(runs: Runs) -> int:
    """Return the number of runs that ended early, or whose last losses exceed their first loss."""
    return int((runs.losses(20) >= np.array([result["loss"][0] for result in runs.results])).sum())


def only_linear_diverges(cosine: int, linear: int, count: int) -> bool:
    """Return True if more than half of the linear runs diverge, and no cosine run does."""
    return cosine == 0 and linear > count / 2


@experiment("A linear schedule of tau typically leads to divergence; a cosine does not", "Ramesh et al. 2021, App. A.2")
def tau_schedule(folder: Path, quick: bool) -> Finding:
    """Count the runs that diverge with either schedule, at two learning rates."""
    kinds, rates = {"cosine": Anneal, "linear": LinearAnneal}, (1e-2,) if quick else (1e-2, 3e-2)
    grid = {(name, lr): {"schedule": kind, "lr": lr} for name, kind in kinds.items() for lr in rates}
    results = sweep(folder, quick, grid)
    by_cosine, by_linear = (sum(diverged(results.runs[name, lr]) for lr in rates) for name in kinds)
    count = len(rates) * len(results.settings["seeds"])
    cosine, linear = (results.runs[name, rates[0]].values("true") for name in kinds)
    return results.finding(
        only_linear_diverges(by_cosine, by_linear, count),
        f"Of {count} runs each, {by_cosine} diverge with a cosine and {by_linear} with a linear schedule. The negative "
        f"ELB of linear less cosine at learning rate {rates[0]:g} is {over_seeds(linear - cosine)} nats per value.",
        ("schedule", "learning rate"),
        {"diverged": diverged, **COLUMNS},
        {"loss, first seed": {f"{name}, {lr:g}": runs.curve for (name, lr), runs in results.runs.items()}},
    )


@experiment("Max-pooling in the encoder gives a better ELB than average-pooling", "Ramesh et al. 2021, App. A.1")
def pooling(folder: Path, quick: bool) -> Finding:
    """Compare the bound with both poolings, from the same initial weights."""
    results = sweep(folder, quick, {"max": {}, "average": {"pool": nn.AvgPool2d}})
    return results.best("max", "true", "negative ELB", ("pooling",), COLUMNS)


@experiment(
    "The logit-Laplace density, bounded like pixels, gives a better ELB than l1 and l2 (Laplace and normal densities)",
    "Ramesh et al. 2021, App. A.3",
)
def pixel_density(folder: Path, quick: bool) -> Finding:
    """Compare the bound, and the probability of values outside (0, 1). All densities are of the same mapped pixels."""
    kinds = {"logit-Laplace": RelaxedELB, "Laplace": LaplaceELB, "normal": GaussianELB}
    results = sweep(folder, quick, {name: {"objective": kind} for name, kind in kinds.items()})
    columns = COLUMNS | {"probability outside": lambda runs: f"{runs.mean('outside'):.1%}"}
    return results.best("logit-Laplace", "true", "negative ELB", ("density",), columns)
