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

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from limner.distributed.gradient_reducers import Plain
from limner.distributed.powersgd import Matrix, PowerSGD, PowerSGDConfig
from limner.optim.optimizers import AdamWConfig, MuonConfig
from limner.optim.param_groups import block_matrices
from limner.reproduce.report import Finding
from limner.reproduce.sweep import Result, Trials

CLAIM = (
    "At equal rank, and so with as many bytes, Dion learns as fast as with whole gradients, and faster than PowerSGD"
)
SOURCE = "Ahn et al. 2025, arXiv:2504.05295, beside Ramesh et al. 2021, App. E.2"

_LAST = 50  # last updates whose loss is averaged
_DECAY = 0.05  # decay of the momentum in the directions of an update: 1 - mu


class Dion(PowerSGD):
    """A reducer that returns Dion's update in place of the gradient."""

    def take(
        self, matrix: Matrix, error: Float[Tensor, "h w"], p: Float[Tensor, "m r"], q: Float[Tensor, "n r"]
    ) -> None:
        matrix.keep(error.addmm_(*matrix.product(p, q), alpha=-_DECAY))
        matrix.start = F.normalize(q, dim=0)
        self.factors.append((matrix, p, matrix.start * max(1, error.shape[0] / error.shape[1]) ** 0.5))


@dataclass(frozen=True, kw_only=True)
class AsGiven:
    """An optimizer config: block matrices use their gradients as updates, other parameters use AdamW."""

    lr: float
    others: AdamWConfig

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = block_matrices(model)
        group: dict[str, Any] = {"params": matrices, "initial_lr": self.lr}
        return [torch.optim.SGD([group], lr=self.lr, weight_decay=0.01), *self.others.build(model, frozenset(matrices))]


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a small prior with two replicas. `kind` is one of `KINDS`."""

    kind: str
    rank: int
    lr: float
    seed: int
    steps: int
    width: int = 96
    others: float = 0.032  # learning rate of parameters other than block matrices


#: Learning rates: the best of those tried on seed 0
#: (docs/log/2026-11-25.md, "Dion against PowerSGD at equal rank").
KINDS = {"AdamW": 8e-3, "Muon": 0.02, "PowerSGD, AdamW": 8e-3, "PowerSGD, Muon": 0.02, "Dion": 0.02}


def trial(of: Training) -> Result:
    """Return the losses, and bytes sent per step."""
    from limner.reproduce import replicas

    others = AdamWConfig(lr=of.others, betas=(0.9, 0.98))
    if of.kind == "Dion":
        optimizer: Any = AsGiven(lr=of.lr, others=others)
    else:
        optimizer = (
            MuonConfig(lr=of.lr, fallback_adamw=others)
            if "Muon" in of.kind
            else AdamWConfig(lr=of.lr, betas=(0.9, 0.98))
        )
    config = PowerSGDConfig(rank=of.rank or None)
    trained = replicas.train(
        lambda: Plain() if not of.rank else Dion(config) if of.kind == "Dion" else PowerSGD(config),
        width=of.width, steps=of.steps, seed=of.seed, optimizer=optimizer,
        clip_norm=None if of.kind == "Dion" else 1.0,  # all Dion updates have the same norm
    )  # fmt: skip
    strategy = trained.run.parallel
    assert isinstance(strategy, replicas.SimulatedReplicas)
    return {"loss": trained.loss.tolist(), "sent": strategy.groups[0].sent / of.steps}


def reproduce(trials: Trials, quick: bool) -> Finding:
    """Compare Dion with PowerSGD and uncompressed gradients under AdamW and Muon."""
    ranks, seeds, steps = ((8,), range(1, 2), 10) if quick else ((4, 16), range(1, 4), 300)
    cases = [(kind, rank) for kind in KINDS for rank in ((0,) if kind in ("AdamW", "Muon") else ranks)]
    settings = [
        Training(kind=kind, rank=rank, lr=KINDS[kind], seed=seed, steps=steps) for kind, rank in cases for seed in seeds
    ]
    results = iter(trials.run(trial, settings, "training priors"))
    found = {case: [next(results) for _ in seeds] for case in cases}
    losses = {case: np.array([np.mean(r["loss"][-_LAST:]) for r in some]) for case, some in found.items()}
    whole = min((("AdamW", 0), ("Muon", 0)), key=lambda case: losses[case].mean())
    noise = float(losses[whole].std(ddof=1)) if len(seeds) > 1 else 0.0
    rows = [
        (
            kind,
            rank or "-",
            f"{some[0]['sent'] / 1e6:.2f} MB",
            f"{losses[kind, rank].mean():.4f}",
            f"{losses[kind, rank].min():.4f} to {losses[kind, rank].max():.4f}",
        )
        for (kind, rank), some in found.items()
    ]
    gaps = [losses["Dion", rank].mean() - losses[whole].mean() for rank in ranks]
    ahead = [
        min(losses["PowerSGD, AdamW", rank].mean(), losses["PowerSGD, Muon", rank].mean()) - losses["Dion", rank].mean()
        for rank in ranks
    ]
    return Finding(
        name="dion",
        claim=CLAIM,
        source=SOURCE,
        holds=all(gap < noise for gap in gaps) and all(more > 0 for more in ahead),
        verdict=". ".join(
            f"At rank {rank} Dion's loss is {gap:+.4f} against {whole[0]} with whole gradients, and {-more:+.4f} "
            "against the better of PowerSGD's"
            for rank, gap, more in zip(ranks, gaps, ahead, strict=True)
        )
        + f". Seeds differ by {noise:.4f}.",
        header=("optimiser", "rank", "sent per update", "loss at the end", "of seeds"),
        rows=rows,
        curves={
            f"loss, first seed, rank {ranks[-1]}": {
                kind: list(enumerate(some[0]["loss"])) for (kind, rank), some in found.items() if rank in (0, ranks[-1])
            }
        },
        settings={"seeds": list(seeds), **{k: asdict(settings[0])[k] for k in ("steps", "width")}},
    )
