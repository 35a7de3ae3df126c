"""Table 1: the smallest PowerSGD rank that does not raise the loss, in models of several widths.

Each width trains with uncompressed gradients and with several ranks, on the same batches from the same initial weights.
A gap is a final loss, averaged over seeds, that exceeds the uncompressed loss by at least the standard deviation of the
uncompressed loss over seeds. The paper's widths are 1920 to 3968 and its ranks multiples of 128; here
ranks double.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from limner.reproduce.report import Finding
from limner.reproduce.sweep import Result, Trials

CLAIM = "The smallest compression rank without a gap in the loss grows with the model's width: the rate stays the same"
SOURCE = "Ramesh et al. 2021, §2.5, Table 1"

_LAST = 50  # last updates whose loss is averaged


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a small prior with two replicas; rank 0 is uncompressed."""

    width: int
    rank: int
    seed: int
    steps: int


def trial(of: Training) -> Result:
    """Return the losses, and bytes sent per step for block matrices."""
    from limner.distributed.gradient_reducers import Plain
    from limner.distributed.powersgd import PowerSGD, PowerSGDConfig
    from limner.optim.param_groups import block_matrices
    from limner.reproduce import replicas

    trained = replicas.train(
        (lambda: PowerSGD(PowerSGDConfig(rank=of.rank))) if of.rank else Plain,
        width=of.width, steps=of.steps, seed=of.seed,
    )  # fmt: skip
    strategy = trained.run.parallel
    assert isinstance(strategy, replicas.SimulatedReplicas)
    # With two replicas, a ring all-reduce sends each uncompressed number once.
    model, matrices = trained.run.model, frozenset(block_matrices(trained.run.model))
    others = sum(p.nbytes for p in model.parameters() if p not in matrices)
    return {"loss": trained.loss.tolist(), "sent": strategy.groups[0].sent / of.steps - others}


def smallest(gaps: dict[int, float], noise: float) -> int | None:
    """Return the smallest rank with no gap at this or any larger rank; None if the largest rank has a gap."""
    found = None
    for rank in sorted(gaps, reverse=True):
        if gaps[rank] >= noise:
            break
        found = rank
    return found


def reproduce(trials: Trials, quick: bool) -> Finding:
    """Find the smallest rank without a gap at each width."""
    widths, parts = ((48, 96), (12, 3)) if quick else ((48, 96, 192), (48, 24, 12, 6, 3))
    seeds, steps = range(1, 2 if quick else 4), 10 if quick else 200
    settings = [
        Training(width=width, rank=rank, seed=seed, steps=steps)
        for width in widths
        for rank in (0, *(width // part for part in parts))
        for seed in seeds
    ]
    results = trials.run(trial, settings, "training priors")
    losses = {of: float(np.mean(r["loss"][-_LAST:])) for of, r in zip(settings, results, strict=True)}
    rows, curves, chosen = [], {}, {}
    for width in widths:
        alike = {
            rank: [(of, r) for of, r in zip(settings, results, strict=True) if (of.width, of.rank) == (width, rank)]
            for rank in dict.fromkeys(of.rank for of in settings if of.width == width)
        }
        plain = np.array([losses[of] for of, _ in alike[0]])
        noise = float(plain.std(ddof=1)) if len(plain) > 1 else 0.0
        gaps = {}
        for rank, some in alike.items():
            gap = np.array([losses[of] for of, _ in some]) - plain
            error = gap.std(ddof=1) / len(gap) ** 0.5 if len(gap) > 1 else 0.0
            sent = some[0][1]["sent"] / alike[0][0][1]["sent"]
            rows.append(
                (
                    width,
                    rank or "uncompressed",
                    f"{rank / width:.3f}" if rank else "-",
                    f"{1 - sent:.0%}" if rank else "-",
                    f"{plain.mean() + gap.mean():.4f}",
                    f"{gap.mean():+.4f} ± {1.96 * error:.4f}" if rank else f"± {noise:.4f}",
                )
            )
            if rank:
                gaps[rank] = float(gap.mean())
        chosen[width] = smallest(gaps, noise)
        curves[f"width {width}: loss above the uncompressed one, over rank / width"] = {
            "mean of seeds": [(rank / width, gap) for rank, gap in sorted(gaps.items())],
            "what seeds alone make": [(rank / width, noise) for rank in sorted(gaps)],
        }
    rates = [rank / width for width, rank in chosen.items() if rank]
    same = len(rates) == len(widths) and max(rates) <= 2 * min(rates)
    said = ", ".join(f"{rank or 'none of these'} at width {width}" for width, rank in chosen.items())
    return Finding(
        name="compression-rank",
        claim=CLAIM,
        source=SOURCE,
        holds=same,
        verdict=f"The smallest rank without a gap is {said}. The rate counts as the same if rank / width differs by no "
        "more than a factor of two, which is the step between ranks.",
        header=(
            "width",
            "rank",
            "rank / width",
            "bytes of matrices saved",
            "loss at the end",
            "gap, 95% interval; noise of seeds",
        ),
        rows=rows,
        curves=curves,
        settings={"seeds": list(seeds), **{k: v for k, v in asdict(settings[0]).items() if k == "steps"}},
    )
