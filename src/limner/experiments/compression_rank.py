"""Table 1: the smallest PowerSGD rank that does not raise the loss, in models of several widths.

Each width trains with uncompressed gradients and with several ranks, on the same batches from the same initial weights.
A gap is a final loss, averaged over seeds, that exceeds the uncompressed loss by at least the standard deviation of the
uncompressed loss over seeds. The paper's widths are 1920 to 3968 and its ranks multiples of 128; here
ranks double.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from limner.experiments.report import Finding
from limner.experiments.sweep import Result, TrialRunner

CLAIM = "The smallest compression rank without a gap in the loss grows with the model's width: the rate stays the same"
SOURCE = "Ramesh et al. 2021, §2.5, Table 1"

_LAST = 50  # last updates whose loss is averaged


@dataclass(frozen=True, kw_only=True)
class CompressionRankSetting:
    """Settings of a small prior with two replicas; rank 0 is uncompressed."""

    width: int
    rank: int
    seed: int
    steps: int


def trial(setting: CompressionRankSetting) -> Result:
    """Return the losses, and bytes sent per step for block matrices."""
    from limner.distributed.gradient_reducers import Fp32Reducer
    from limner.distributed.powersgd import PowerSGD, PowerSGDConfig
    from limner.experiments import replicas
    from limner.optim.param_groups import block_matrices

    trained = replicas.train(
        (lambda: PowerSGD(PowerSGDConfig(rank=setting.rank))) if setting.rank else Fp32Reducer,
        width=setting.width, steps=setting.steps, seed=setting.seed,
    )  # fmt: skip
    strategy = trained.run.parallel
    assert isinstance(strategy, replicas.SimulatedReplicas)
    # With two replicas, a ring all-reduce sends each uncompressed number once.
    model, matrices = trained.run.model, frozenset(block_matrices(trained.run.model))
    uncompressed = sum(p.nbytes for p in model.parameters() if p not in matrices)
    return {"loss": trained.loss.tolist(), "sent": strategy.groups[0].sent / setting.steps - uncompressed}


def smallest_rank(gaps: dict[int, float], noise: float) -> int | None:
    """Return the smallest rank with no gap at this or any larger rank; None if the largest rank has a gap."""
    smallest = None
    for rank in sorted(gaps, reverse=True):
        if gaps[rank] >= noise:
            break
        smallest = rank
    return smallest


def reproduce(trials: TrialRunner, quick: bool) -> Finding:
    """Find the smallest rank without a gap at each width."""
    widths, divisors = ((48, 96), (12, 3)) if quick else ((48, 96, 192), (48, 24, 12, 6, 3))
    seeds, steps = range(1, 2 if quick else 4), 10 if quick else 200
    settings = [
        CompressionRankSetting(width=width, rank=rank, seed=seed, steps=steps)
        for width in widths
        for rank in (0, *(width // divisor for divisor in divisors))
        for seed in seeds
    ]
    results = trials.run(trial, settings, "training priors")
    losses = {setting: float(np.mean(r["loss"][-_LAST:])) for setting, r in zip(settings, results, strict=True)}
    rows, curves, ranks = [], {}, {}
    for width in widths:
        runs_by_rank = {
            rank: [(s, r) for s, r in zip(settings, results, strict=True) if (s.width, s.rank) == (width, rank)]
            for rank in dict.fromkeys(s.rank for s in settings if s.width == width)
        }
        plain = np.array([losses[setting] for setting, _ in runs_by_rank[0]])
        noise = float(plain.std(ddof=1)) if len(plain) > 1 else 0.0
        gaps = {}
        for rank, runs in runs_by_rank.items():
            gap = np.array([losses[setting] for setting, _ in runs]) - plain
            error = gap.std(ddof=1) / len(gap) ** 0.5 if len(gap) > 1 else 0.0
            sent = runs[0][1]["sent"] / runs_by_rank[0][0][1]["sent"]
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
        ranks[width] = smallest_rank(gaps, noise)
        curves[f"width {width}: loss above the uncompressed one, over rank / width"] = {
            "mean of seeds": [(rank / width, gap) for rank, gap in sorted(gaps.items())],
            "standard deviation over seeds": [(rank / width, noise) for rank in sorted(gaps)],
        }
    rates = [rank / width for width, rank in ranks.items() if rank]
    same_rate = len(rates) == len(widths) and max(rates) <= 2 * min(rates)
    listed = ", ".join(f"{rank or 'none'} at width {width}" for width, rank in ranks.items())
    return Finding(
        name="compression-rank",
        claim=CLAIM,
        source=SOURCE,
        holds=same_rate,
        verdict=f"The smallest rank without a gap is {listed}. The rate counts as the same if rank / width differs by "
        "at most a factor of two, the step between ranks.",
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
