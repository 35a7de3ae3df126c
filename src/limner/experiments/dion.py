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

from limner.distributed.gradient_reducers import Fp32Reducer
from limner.distributed.powersgd import Matrix, PowerSGD, PowerSGDConfig
from limner.experiments.report import Finding
from limner.experiments.sweep import Result, TrialRunner
from limner.optim.optimizers import AdamWConfig, MuonConfig
from limner.optim.param_groups import block_matrices

CLAIM = "At equal rank and bytes, Dion learns as fast as with uncompressed gradients, and faster than PowerSGD"
SOURCE = "Ahn et al. 2025, arXiv:2504.05295, compared with Ramesh et al. 2021, App. E.2"

_LAST = 50  # last updates whose loss is averaged
_DECAY = 0.05  # decay of the momentum in the directions of an update: 1 - mu


class Dion(PowerSGD):
    """A reducer that returns Dion's update in place of the gradient."""

    def subtract_update(
        self, matrix: Matrix, error: Float[Tensor, "h w"], p: Float[Tensor, "m r"], q: Float[Tensor, "n r"]
    ) -> None:
        matrix.store_error(error.addmm_(*matrix.product(p, q), alpha=-_DECAY))
        matrix.q0 = F.normalize(q, dim=0)
        self.factors.append((matrix, p, matrix.q0 * max(1, error.shape[0] / error.shape[1]) ** 0.5))


@dataclass(frozen=True, kw_only=True)
class UpdateFromGradientConfig:
    """An optimizer config: block matrices use their gradients as updates, other parameters use AdamW."""

    lr: float
    adamw: AdamWConfig

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = block_matrices(model)
        group: dict[str, Any] = {"params": matrices, "initial_lr": self.lr}
        return [torch.optim.SGD([group], lr=self.lr, weight_decay=0.01), *self.adamw.build(model, frozenset(matrices))]


@dataclass(frozen=True, kw_only=True)
class DionSetting:
    """Settings of a small prior with two replicas. `kind` is a key of `LR`."""

    kind: str
    rank: int
    lr: float
    seed: int
    steps: int
    width: int = 96
    fallback_lr: float = 0.032  # learning rate of parameters other than block matrices


#: The best learning rates on seed 0
#: (docs/log/2026-11-25.md, "Dion against PowerSGD at equal rank").
LR = {"AdamW": 8e-3, "Muon": 0.02, "PowerSGD, AdamW": 8e-3, "PowerSGD, Muon": 0.02, "Dion": 0.02}


def trial(setting: DionSetting) -> Result:
    """Return the losses, and bytes sent per step."""
    from limner.experiments import replicas

    adamw = AdamWConfig(lr=setting.fallback_lr, betas=(0.9, 0.98))
    if setting.kind == "Dion":
        optimizer: Any = UpdateFromGradientConfig(lr=setting.lr, adamw=adamw)
    else:
        optimizer = (
            MuonConfig(lr=setting.lr, fallback_adamw=adamw)
            if "Muon" in setting.kind
            else AdamWConfig(lr=setting.lr, betas=(0.9, 0.98))
        )
    config = PowerSGDConfig(rank=setting.rank or None)
    trained = replicas.train(
        lambda: Fp32Reducer() if not setting.rank else Dion(config) if setting.kind == "Dion" else PowerSGD(config),
        width=setting.width, steps=setting.steps, seed=setting.seed, optimizer=optimizer,
        clip_norm=None if setting.kind == "Dion" else 1.0,  # all Dion updates have the same norm
    )  # fmt: skip
    strategy = trained.run.parallel
    assert isinstance(strategy, replicas.SimulatedReplicas)
    return {"loss": trained.loss.tolist(), "sent": strategy.groups[0].sent / setting.steps}


def reproduce(trials: TrialRunner, quick: bool) -> Finding:
    """Compare Dion with PowerSGD and uncompressed gradients under AdamW and Muon."""
    ranks, seeds, steps = ((8,), range(1, 2), 10) if quick else ((4, 16), range(1, 4), 300)
    cases = [(kind, rank) for kind in LR for rank in ((0,) if kind in ("AdamW", "Muon") else ranks)]
    settings = [
        DionSetting(kind=kind, rank=rank, lr=LR[kind], seed=seed, steps=steps) for kind, rank in cases for seed in seeds
    ]
    results = iter(trials.run(trial, settings, "training priors"))
    cells = {case: [next(results) for _ in seeds] for case in cases}
    losses = {case: np.array([np.mean(r["loss"][-_LAST:]) for r in runs]) for case, runs in cells.items()}
    reference = min((("AdamW", 0), ("Muon", 0)), key=lambda case: losses[case].mean())
    noise = float(losses[reference].std(ddof=1)) if len(seeds) > 1 else 0.0
    rows = [
        (
            kind,
            rank or "-",
            f"{runs[0]['sent'] / 1e6:.2f} MB",
            f"{losses[kind, rank].mean():.4f}",
            f"{losses[kind, rank].min():.4f} to {losses[kind, rank].max():.4f}",
        )
        for (kind, rank), runs in cells.items()
    ]
    gaps = [losses["Dion", rank].mean() - losses[reference].mean() for rank in ranks]
    leads = [
        min(losses["PowerSGD, AdamW", rank].mean(), losses["PowerSGD, Muon", rank].mean()) - losses["Dion", rank].mean()
        for rank in ranks
    ]
    return Finding(
        name="dion",
        claim=CLAIM,
        source=SOURCE,
        holds=all(gap < noise for gap in gaps) and all(lead > 0 for lead in leads),
        verdict=". ".join(
            f"At rank {rank} the loss of Dion differs by {gap:+.4f} from uncompressed {reference[0]} and by "
            f"{-lead:+.4f} from the better PowerSGD"
            for rank, gap, lead in zip(ranks, gaps, leads, strict=True)
        )
        + f". The standard deviation over seeds is {noise:.4f}.",
        header=("optimizer", "rank", "sent per update", "loss at the end", "of seeds"),
        rows=rows,
        curves={
            f"loss, first seed, rank {ranks[-1]}": {
                kind: list(enumerate(runs[0]["loss"])) for (kind, rank), runs in cells.items() if rank in (0, ranks[-1])
            }
        },
        settings={"seeds": list(seeds), **{k: asdict(settings[0])[k] for k in ("steps", "width")}},
    )
