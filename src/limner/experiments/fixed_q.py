"""Section 2.5: the initial matrix Q of each PowerSGD update: fixed, warm-started, or redrawn.

An update sends the component of the error buffers E in r directions, P = E Q. Vogels et al. 2019 warm-start from the
last update's Q, which converges to the largest singular directions of E. The paper draws Q once and keeps it fixed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from limner.distributed.gradient_reducers import Fp32Reducer
from limner.distributed.powersgd import Matrix, PowerSGD, PowerSGDConfig
from limner.experiments.report import Finding
from limner.experiments.sweep import Result, TrialRunner

CLAIM = (
    "A fixed random Q does as well as the last update's Q, with larger error buffers; a new random Q in each update "
    "does worse"
)
SOURCE = "Ramesh et al. 2021, §2.5, footnote 10"

_LAST = 50  # last updates whose loss is averaged


class FixedQ(PowerSGD):
    """PowerSGD with the paper's fixed Q. `residual_shares` records shares left in error buffers."""

    def __init__(self, config: PowerSGDConfig) -> None:
        super().__init__(config)
        self.residual_shares: list[Tensor] = []  # share of a buffer's squared norm left after each update

    def subtract_update(
        self, matrix: Matrix, error: Float[Tensor, "h w"], p: Float[Tensor, "m r"], q: Float[Tensor, "n r"]
    ) -> None:
        super().subtract_update(matrix, error, p, q)
        residual, sent = matrix.error().square().sum(), q.square().sum()
        self.residual_shares.append(residual / (residual + sent))


class WarmStartQ(FixedQ):
    """PowerSGD warm-started from the last update's Q."""

    def subtract_update(
        self, matrix: Matrix, error: Float[Tensor, "h w"], p: Float[Tensor, "m r"], q: Float[Tensor, "n r"]
    ) -> None:
        super().subtract_update(matrix, error, p, q)
        if q.any():
            matrix.q0 = q


class RedrawnQ(FixedQ):
    """PowerSGD with a new random Q in each update, the same on all replicas."""

    def subtract_update(
        self, matrix: Matrix, error: Float[Tensor, "h w"], p: Float[Tensor, "m r"], q: Float[Tensor, "n r"]
    ) -> None:
        super().subtract_update(matrix, error, p, q)
        generator = torch.Generator().manual_seed(len(self.residual_shares))
        matrix.q0 = torch.randn(matrix.q0.shape, generator=generator)


KINDS = {"uncompressed": None, "fixed": FixedQ, "warm start": WarmStartQ, "redrawn": RedrawnQ}


@dataclass(frozen=True, kw_only=True)
class FixedQSetting:
    """Settings of a small prior with two replicas. `kind` is one of `KINDS`."""

    kind: str
    rank: int
    seed: int
    steps: int
    width: int = 96


def trial(setting: FixedQSetting) -> Result:
    """Return the losses, and the mean share left in error buffers."""
    from limner.experiments import replicas

    kind = KINDS[setting.kind]

    def make_reducer() -> Fp32Reducer:
        return kind(PowerSGDConfig(rank=setting.rank)) if kind else Fp32Reducer()

    trained = replicas.train(make_reducer, width=setting.width, steps=setting.steps, seed=setting.seed)
    strategy = trained.run.parallel
    assert isinstance(strategy, replicas.SimulatedReplicas)
    first = strategy.reducers[0]
    residual = torch.stack(first.residual_shares).mean().item() if isinstance(first, FixedQ) else 0.0
    return {"loss": trained.loss.tolist(), "residual": residual}


def reproduce(trials: TrialRunner, quick: bool) -> Finding:
    """Compare each choice of Q with uncompressed gradients."""
    ranks, seeds, steps = ((8,), range(1, 2), 10) if quick else ((4, 16), range(1, 6), 300)
    cases = [("uncompressed", 0), *((kind, rank) for rank in ranks for kind in list(KINDS)[1:])]
    settings = [FixedQSetting(kind=kind, rank=rank, seed=seed, steps=steps) for kind, rank in cases for seed in seeds]
    results = iter(trials.run(trial, settings, "training priors"))
    cells = {case: [next(results) for _ in seeds] for case in cases}
    losses = {case: np.array([np.mean(r["loss"][-_LAST:]) for r in runs]) for case, runs in cells.items()}
    plain = losses["uncompressed", 0]
    noise = float(plain.std(ddof=1)) if len(plain) > 1 else 0.0

    def cost(kind: str, rank: int) -> tuple[float, float]:
        """Return the mean excess loss over seeds, and half of its 95% interval."""
        gap = losses[kind, rank] - plain
        return float(gap.mean()), float(1.96 * gap.std(ddof=1) / len(gap) ** 0.5) if len(gap) > 1 else 0.0

    def residual_share(kind: str, rank: int) -> float:
        return float(np.mean([r["residual"] for r in cells[kind, rank]]))

    rows = [
        (
            kind,
            rank or "-",
            f"{losses[kind, rank].mean():.4f}",
            "{:+.4f} ± {:.4f}".format(*cost(kind, rank)) if rank else f"± {noise:.4f} over seeds",
            f"{residual_share(kind, rank):.1%}" if rank else "-",
        )
        for kind, rank in cases
    ]
    as_good = [cost("fixed", rank)[0] < cost("warm start", rank)[0] + noise for rank in ranks]
    leaves_more = [residual_share("fixed", rank) > residual_share("warm start", rank) for rank in ranks]
    worse = [cost("redrawn", rank)[0] > cost("fixed", rank)[0] + noise for rank in ranks]
    last = ranks[-1]
    return Finding(
        name="fixed-q",
        claim=CLAIM,
        source=SOURCE,
        holds=all(as_good) and all(leaves_more) and all(worse),
        verdict="A fixed Q is as good as a warm start, up to one standard deviation over seeds: "
        f"{_by_rank(ranks, as_good)}. It leaves more in the error buffers: {_by_rank(ranks, leaves_more)}. "
        f"A redrawn Q is worse than a fixed one: {_by_rank(ranks, worse)}.",
        header=("Q", "rank", "loss at the end", "above uncompressed, 95% interval", "left in error buffers"),
        rows=rows,
        curves={
            f"loss, first seed, rank {last}": {
                kind: list(enumerate(cells[kind, last if kind != "uncompressed" else 0][0]["loss"])) for kind in KINDS
            }
        },
        settings={"seeds": list(seeds), **{k: asdict(settings[0])[k] for k in ("steps", "width")}},
    )


def _by_rank(ranks: tuple[int, ...], criterion: list[bool]) -> str:
    return ", ".join(f"{'yes' if met else 'no'} at rank {rank}" for rank, met in zip(ranks, criterion, strict=True))
