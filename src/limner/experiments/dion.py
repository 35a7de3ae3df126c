"""Dion (Ahn et al. 2025) against PowerSGD: Dion sends factors of the same size and makes an orthonormal update.

PowerSGD sends two low-rank factors of each gradient, keeps the residual, and gives the product of the factors to AdamW.
Dion sends such factors of the momentum and computes the update from them. For a matrix with gradient G, momentum M and
the last update's Q, where each replica keeps its M and Q:

    B = M + G
    P = orthonormal columns of the mean of B Q       [m, r]
    R = mean of B^T P                                [n, r]
    M = B - (1 - mu) P R^T                           the residual stays, the rest decays
    Q = R with columns of length 1
    update: lr sqrt(max(1, rows / columns)) P Q^T    nearly equal singular values, as in Muon

Dion therefore works without second moments: its state is one number per weight. Here both train with two replicas at
equal rank, against AdamW and Muon with uncompressed gradients. AdamW updates embeddings and output layers in all runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from limner.distributed.compressed_matrix import Matrix
from limner.distributed.gradient_reducers import Fp32Reducer
from limner.distributed.powersgd import PowerSGD, PowerSGDConfig
from limner.experiments import replicas
from limner.experiments.report import Finding, experiment
from limner.experiments.sweep import Sweep, deviation, span
from limner.optim.optimizers import AdamWConfig, MuonConfig
from limner.optim.param_groups import block_matrices

DECAY = 0.05  # decay of the momentum in the directions of an update: 1 - mu


class Dion(PowerSGD):
    """A reducer that returns Dion's update in place of the gradient."""

    def subtract_update(self, matrix: Matrix, p: Float[Tensor, "m r"], q: Float[Tensor, "n r"]) -> None:
        error = matrix.error()
        matrix.store_error(error.addmm_(*matrix.product(p, q), alpha=-DECAY))
        matrix.q0 = F.normalize(q, dim=0)
        self.factors[matrix.parameter] = matrix, p, matrix.q0 * max(1, error.shape[0] / error.shape[1]) ** 0.5


@dataclass(frozen=True, kw_only=True)
class UpdateFromGradientConfig:
    """An optimizer config: block matrices use their gradients as updates, other parameters use AdamW."""

    lr: float
    adamw: AdamWConfig

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = block_matrices(model)
        group: dict[str, Any] = {"params": matrices, "initial_lr": self.lr}
        return [torch.optim.SGD([group], lr=self.lr, weight_decay=0.01), *self.adamw.build(model, frozenset(matrices))]


# The best learning rates on seed 0 (docs/log/2026-11-25.md, "Dion against PowerSGD at equal rank").
ADAMW = AdamWConfig(lr=8e-3, betas=(0.9, 0.98))
FALLBACK = AdamWConfig(lr=0.032, betas=(0.9, 0.98))  # for parameters other than block matrices
MUON = MuonConfig(lr=0.02, fallback_adamw=FALLBACK)
UPDATE = UpdateFromGradientConfig(lr=0.02, adamw=FALLBACK)


@experiment(
    "At equal rank and bytes, Dion learns as fast as with uncompressed gradients, and faster than PowerSGD",
    "Ahn et al. 2025, arXiv:2504.05295, compared with Ramesh et al. 2021, App. E.2",
)
def dion(folder: Path, quick: bool) -> Finding:
    """Compare Dion with PowerSGD and uncompressed gradients under AdamW and Muon."""
    ranks, seeds, steps = ((8,), range(1, 2), 10) if quick else ((4, 16), range(1, 4), 300)
    grid: dict[tuple[str, Any], dict[str, Any]] = {
        ("AdamW", "-"): {"reducer": Fp32Reducer, "optimizer": ADAMW},
        ("Muon", "-"): {"reducer": Fp32Reducer, "optimizer": MUON},
    }
    for name, optimizer in {"PowerSGD, AdamW": ADAMW, "PowerSGD, Muon": MUON, "Dion": UPDATE}.items():
        for r in ranks:
            reducer = partial(Dion if name == "Dion" else PowerSGD, PowerSGDConfig(rank=r))
            grid[name, r] = {"reducer": reducer, "optimizer": optimizer}
            if name == "Dion":
                grid[name, r]["clip_norm"] = None  # all its updates have the same norm
    sweep = Sweep(folder, replicas.trial, grid, seeds, steps=steps, width=96)
    loss = {label: float(runs.losses().mean()) for label, runs in sweep.runs.items()}
    reference = min((("AdamW", "-"), ("Muon", "-")), key=lambda label: loss[label])
    noise = deviation(sweep.runs[reference].losses())
    gaps = [loss["Dion", rank] - loss[reference] for rank in ranks]
    leads = [min(loss["PowerSGD, AdamW", rank], loss["PowerSGD, Muon", rank]) - loss["Dion", rank] for rank in ranks]
    return sweep.finding(
        all(gap < noise for gap in gaps) and all(lead > 0 for lead in leads),
        ". ".join(
            f"At rank {rank} the loss of Dion differs by {gap:+.4f} from uncompressed {reference[0]} and by "
            f"{-lead:+.4f} from the better PowerSGD"
            for rank, gap, lead in zip(ranks, gaps, leads, strict=True)
        )
        + f". The standard deviation over seeds is {noise:.4f}.",
        ("optimizer", "rank"),
        {
            "sent per update": lambda runs: f"{runs.results[0]['sent'] / 1e6:.2f} MB",
            "loss at the end": lambda runs: f"{runs.losses().mean():.4f}",
            "of seeds": lambda runs: span(runs.losses(), ".4f"),
        },
        {
            f"loss, first seed, rank {ranks[-1]}": {
                name: runs.curve for (name, rank), runs in sweep.runs.items() if rank in ("-", ranks[-1])
            }
        },
    )
