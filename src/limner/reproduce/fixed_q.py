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

from limner.distributed.gradient_reducers import GradientReducer, Plain
from limner.distributed.powersgd import Matrix, PowerSGD, PowerSGDConfig
from limner.reproduce.report import Finding
from limner.reproduce.sweep import Result, Trials

CLAIM = (
    "A Q that stays as it was drawn does as well as the last update's, and leaves more out; drawn anew it does worse"
)
SOURCE = "Ramesh et al. 2021, §2.5, footnote 10"

_LAST = 50  # last updates whose loss is averaged


class Fixed(PowerSGD):
    """PowerSGD with the paper's fixed Q. `left` records shares left in buffers."""

    def __init__(self, config: PowerSGDConfig) -> None:
        super().__init__(config)
        self.left: list[Tensor] = []  # share of a buffer's squared norm left after each update

    def take(
        self, matrix: Matrix, error: Float[Tensor, "h w"], p: Float[Tensor, "m r"], q: Float[Tensor, "n r"]
    ) -> None:
        super().take(matrix, error, p, q)
        rest, taken = matrix.error().square().sum(), q.square().sum()
        self.left.append(rest / (rest + taken))


class Warm(Fixed):
    """PowerSGD warm-started from the last update's Q."""

    def take(
        self, matrix: Matrix, error: Float[Tensor, "h w"], p: Float[Tensor, "m r"], q: Float[Tensor, "n r"]
    ) -> None:
        super().take(matrix, error, p, q)
        if q.any():
            matrix.start = q


class Anew(Fixed):
    """PowerSGD with a new random Q in each update, the same on all replicas."""

    def take(
        self, matrix: Matrix, error: Float[Tensor, "h w"], p: Float[Tensor, "m r"], q: Float[Tensor, "n r"]
    ) -> None:
        super().take(matrix, error, p, q)
        generator = torch.Generator().manual_seed(len(self.left))
        matrix.start = torch.randn(matrix.start.shape, generator=generator)


KINDS: dict[str, type[Fixed] | None] = {"uncompressed": None, "fixed": Fixed, "the last": Warm, "drawn anew": Anew}


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a small prior with two replicas. `kind` is one of `KINDS`."""

    kind: str
    rank: int
    seed: int
    steps: int
    width: int = 96


def trial(of: Training) -> Result:
    """Return the losses, and the mean share left in error buffers."""
    from limner.reproduce import replicas

    kind = KINDS[of.kind]

    def make() -> GradientReducer:
        return kind(PowerSGDConfig(rank=of.rank)) if kind else Plain()

    trained = replicas.train(make, width=of.width, steps=of.steps, seed=of.seed)
    strategy = trained.run.parallel
    assert isinstance(strategy, replicas.SimulatedReplicas)
    first = strategy.reducers[0]
    left = torch.stack(first.left).mean().item() if isinstance(first, Fixed) else 0.0
    return {"loss": trained.loss.tolist(), "left": left}


def reproduce(trials: Trials, quick: bool) -> Finding:
    """Compare each choice of Q with uncompressed gradients."""
    ranks, seeds, steps = ((8,), range(1, 2), 10) if quick else ((4, 16), range(1, 6), 300)
    cases = [("uncompressed", 0), *((kind, rank) for rank in ranks for kind in list(KINDS)[1:])]
    settings = [Training(kind=kind, rank=rank, seed=seed, steps=steps) for kind, rank in cases for seed in seeds]
    results = iter(trials.run(trial, settings, "training priors"))
    found = {case: [next(results) for _ in seeds] for case in cases}
    losses = {case: np.array([np.mean(r["loss"][-_LAST:]) for r in some]) for case, some in found.items()}
    plain = losses["uncompressed", 0]
    noise = float(plain.std(ddof=1)) if len(plain) > 1 else 0.0

    def cost(kind: str, rank: int) -> tuple[float, float]:
        """Return the mean excess loss over seeds, and half of its 95% interval."""
        gap = losses[kind, rank] - plain
        return float(gap.mean()), float(1.96 * gap.std(ddof=1) / len(gap) ** 0.5) if len(gap) > 1 else 0.0

    def left(kind: str, rank: int) -> float:
        return float(np.mean([r["left"] for r in found[kind, rank]]))

    rows = [
        (
            kind,
            rank or "-",
            f"{losses[kind, rank].mean():.4f}",
            "{:+.4f} ± {:.4f}".format(*cost(kind, rank)) if rank else f"seeds differ by {noise:.4f}",
            f"{left(kind, rank):.1%}" if rank else "-",
        )
        for kind, rank in cases
    ]
    as_good = [cost("fixed", rank)[0] < cost("the last", rank)[0] + noise for rank in ranks]
    leaves_more = [left("fixed", rank) > left("the last", rank) for rank in ranks]
    worse = [cost("drawn anew", rank)[0] > cost("fixed", rank)[0] + noise for rank in ranks]
    middle = ranks[-1]
    return Finding(
        name="fixed-q",
        claim=CLAIM,
        source=SOURCE,
        holds=all(as_good) and all(leaves_more) and all(worse),
        verdict="As good as the last update's, up to what seeds make: "
        f"{_said(ranks, as_good)}. Leaves more in the buffers: {_said(ranks, leaves_more)}. "
        f"Drawn anew is worse than fixed: {_said(ranks, worse)}.",
        header=("Q", "rank", "loss at the end", "above uncompressed, 95% interval", "left in the buffers"),
        rows=rows,
        curves={
            f"loss, first seed, rank {middle}": {
                kind: list(enumerate(found[kind, middle if kind != "uncompressed" else 0][0]["loss"])) for kind in KINDS
            }
        },
        settings={"seeds": list(seeds), **{k: asdict(settings[0])[k] for k in ("steps", "width")}},
    )


def _said(ranks: tuple[int, ...], holds: list[bool]) -> str:
    return ", ".join(f"{'yes' if one else 'no'} at rank {rank}" for rank, one in zip(ranks, holds, strict=True))
