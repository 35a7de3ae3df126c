"""PowerSGD between two replicas (Ramesh et al. 2021, §2.5 and App. E.2): rank, Q, and orthonormal columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from limner.distributed.compressed_matrix import Matrix
from limner.distributed.gradient_reducers import Fp32Reducer
from limner.distributed.powersgd import EPS, PowerSGD, PowerSGDConfig, orthonormal
from limner.experiments import replicas
from limner.experiments.report import Finding, experiment
from limner.experiments.sweep import Result, Sweep, deviation, over_seeds
from limner.numerics.formats import E6M9


def smallest_rank(gaps: dict[int, float], noise: float) -> int | None:
    """Return the smallest rank with no gap at this or any larger rank; None if the largest rank has a gap."""
    smallest = None
    for rank in sorted(gaps, reverse=True):
        if gaps[rank] >= noise:
            break
        smallest = rank
    return smallest


@experiment(
    "The smallest compression rank without a gap in the loss grows with the model's width: the rate stays the same",
    "Ramesh et al. 2021, §2.5, Table 1",
)
def compression_rank(folder: Path, quick: bool) -> Finding:
    """Find the smallest rank without a gap at each width.

    Each width trains with uncompressed gradients and with several ranks, on the same batches from the same initial
    weights. A gap is a final loss, averaged over seeds, that exceeds the uncompressed loss by at least the standard
    deviation of the uncompressed loss over seeds. The paper's widths are 1920 to 3968 and its ranks multiples of 128;
    here ranks double.
    """
    widths, divisors = ((48, 96), (12, 3)) if quick else ((48, 96, 192), (48, 24, 12, 6, 3))
    ranks = {w: [w // divisor for divisor in divisors] for w in widths}
    grid: dict[tuple[int, Any], dict[str, Any]] = {}
    for w in widths:
        grid[w, "uncompressed"] = {"width": w, "reducer": Fp32Reducer}
        grid |= {(w, r): {"width": w, "reducer": partial(PowerSGD, PowerSGDConfig(rank=r))} for r in ranks[w]}
    sweep = Sweep(folder, replicas.trial, grid, range(1, 2 if quick else 4), steps=10 if quick else 200)
    rows, curves, smallest = [], {}, {}
    for w in widths:
        plain = sweep.runs[w, "uncompressed"]
        noise, gaps = deviation(plain.losses()), {}
        rows.append((w, "uncompressed", "-", "-", f"{plain.losses().mean():.4f}", f"± {noise:.4f}"))
        for r in ranks[w]:
            runs = sweep.runs[w, r]
            differences = runs.losses() - plain.losses()
            saved = 1 - runs.results[0]["sent_matrices"] / plain.results[0]["sent_matrices"]
            loss = f"{runs.losses().mean():.4f}"
            rows.append((w, r, f"{r / w:.3f}", f"{saved:.0%}", loss, str(over_seeds(differences))))
            gaps[r] = float(differences.mean())
        smallest[w] = smallest_rank(gaps, noise)
        curves[f"width {w}: loss above the uncompressed one, over rank / width"] = {
            "mean of seeds": [(r / w, gap) for r, gap in sorted(gaps.items())],
            "standard deviation over seeds": [(r / w, noise) for r in sorted(gaps)],
        }
    rates = [rank / width for width, rank in smallest.items() if rank]
    listed = ", ".join(f"{rank or 'none'} at width {width}" for width, rank in smallest.items())
    return Finding(
        holds=len(rates) == len(widths) and max(rates) <= 2 * min(rates),
        verdict=f"The smallest rank without a gap is {listed}. The rate counts as the same if rank / width differs by "
        "at most a factor of two, the step between ranks.",
        header=("width", "rank", "rank / width", "bytes of matrices saved", "loss at the end",
                "gap, 95% interval; noise of seeds"),
        rows=rows,
        curves=curves,
        settings=sweep.settings,
    )  # fmt: skip


class PowerSGDWithQ(PowerSGD):
    """PowerSGD whose Q is "fixed", a "warm start" or "redrawn". `residual_shares` has the share of each buffer's
    squared norm that each update leaves."""

    def __init__(self, config: PowerSGDConfig, kind: str) -> None:
        super().__init__(config)
        self.kind = kind
        self.residual_shares: list[Tensor] = []

    def subtract_update(self, matrix: Matrix, p: Float[Tensor, "m r"], q: Float[Tensor, "n r"]) -> None:
        super().subtract_update(matrix, p, q)
        residual, sent = matrix.error().square().sum(), q.square().sum()
        self.residual_shares.append(residual / (residual + sent))
        if self.kind == "warm start" and q.any():
            matrix.q0 = q
        elif self.kind == "redrawn":  # the same on all replicas
            generator = torch.Generator().manual_seed(len(self.residual_shares))
            matrix.q0 = torch.randn(matrix.q0.shape, generator=generator)


def fixed_q_trial(**settings: Any) -> Result:
    """Return the result of `replicas.train`, and the mean share left in error buffers."""
    result, (first, _) = replicas.train(**settings)
    shares = getattr(first, "residual_shares", [torch.zeros(())])
    return result | {"residual": torch.stack(shares).mean().item()}


@experiment(
    "A fixed random Q does as well as the last update's Q, with larger error buffers; a new random Q in each update "
    "does worse",
    "Ramesh et al. 2021, §2.5, footnote 10",
)
def fixed_q(folder: Path, quick: bool) -> Finding:
    """Compare the initial matrices Q of an update: fixed, warm-started, or redrawn.

    An update sends the component of the error buffers E in r directions, P = E Q. Vogels et al. 2019 warm-start from
    the last update's Q, which converges to the largest singular directions of E. The paper draws Q once.
    """
    ranks, seeds, steps = ((8,), range(1, 2), 10) if quick else ((4, 16), range(1, 6), 300)
    grid: dict[tuple[str, Any], dict[str, Any]] = {("uncompressed", "-"): {"reducer": Fp32Reducer}}
    for r in ranks:
        for kind in ("fixed", "warm start", "redrawn"):
            grid[kind, r] = {"reducer": partial(PowerSGDWithQ, PowerSGDConfig(rank=r), kind)}
    sweep = Sweep(folder, fixed_q_trial, grid, seeds, steps=steps, width=96)
    plain = sweep.runs["uncompressed", "-"]
    noise = deviation(plain.losses())
    cost = {label: float((runs.losses() - plain.losses()).mean()) for label, runs in sweep.runs.items()}
    residual = {label: runs.mean("residual") for label, runs in sweep.runs.items()}

    def by_rank(criterion: list[bool]) -> str:
        return ", ".join(f"{'yes' if met else 'no'} at rank {rank}" for rank, met in zip(ranks, criterion, strict=True))

    as_good = [cost["fixed", r] < cost["warm start", r] + noise for r in ranks]
    leaves_more = [residual["fixed", r] > residual["warm start", r] for r in ranks]
    worse = [cost["redrawn", r] > cost["fixed", r] + noise for r in ranks]
    return sweep.finding(
        all(as_good + leaves_more + worse),
        "A fixed Q is as good as a warm start, up to one standard deviation over seeds: "
        f"{by_rank(as_good)}. It leaves more in the error buffers: {by_rank(leaves_more)}. "
        f"A redrawn Q is worse than a fixed one: {by_rank(worse)}.",
        ("Q", "rank"),
        {
            "loss at the end": lambda runs: f"{runs.losses().mean():.4f}",
            "above uncompressed, 95% interval": lambda runs: (
                f"± {noise:.4f} over seeds" if runs is plain else str(over_seeds(runs.losses() - plain.losses()))
            ),
            "left in error buffers": lambda runs: "-" if runs is plain else f"{residual[runs.label]:.1%}",
        },
        {
            f"loss, first seed, rank {ranks[-1]}": {
                kind: runs.curve for (kind, rank), runs in sweep.runs.items() if rank in ("-", ranks[-1])
            }
        },
    )


def classical(p: Float[Tensor, "k m r"]) -> Float[Tensor, "k m r"]:
    """Classical Gram-Schmidt: subtract from each column its projections onto the previous columns."""
    columns: list[Tensor] = []
    for column in p.unbind(-1):
        if columns:
            before = torch.stack(columns, -1)
            column = column - (before @ (before.mT @ column.unsqueeze(-1))).squeeze(-1)
        columns.append(column / column.norm(dim=-1, keepdim=True))
    return torch.stack(columns, -1)


def modified(p: Float[Tensor, "k m r"]) -> Float[Tensor, "k m r"]:
    """Modified Gram-Schmidt: one projection after another, as in torch's PowerSGD."""
    p = p.clone()
    for i in range(p.shape[-1]):
        column = p[..., i : i + 1] / p[..., i : i + 1].norm(dim=-2, keepdim=True)
        p[..., i : i + 1] = column
        p[..., i + 1 :] -= column @ (column.mT @ p[..., i + 1 :])
    return p


METHODS: dict[str, Callable[[Tensor], Tensor]] = {
    "Gram-Schmidt, classical": classical,
    "Gram-Schmidt, modified": modified,
    "Householder": partial(orthonormal, eps=0.0),
    f"Householder, {EPS:g} I added": orthonormal,
}
FORMATS: dict[str, Callable[[Tensor], Tensor]] = {"fp32": Tensor.float, "1-6-9": E6M9.round}


def orthonormality(
    *, method: str, form: str, digits: Sequence[int | None], seed: int, matrices: int = 8, m: int = 256, r: int = 32
) -> Result:
    """Return the largest entry of |P^T P - I| for matrices P with condition number 10^d, for each d of `digits`. With d
    None, columns are repeated."""
    errors = {}
    for d in digits:
        generator = torch.Generator().manual_seed(seed)
        draw = partial(torch.randn, matrices, generator=generator, dtype=torch.float64)
        left, right = (torch.linalg.qr(draw(rows, r)).Q for rows in (m, r))
        if d is None:
            p = draw(m, r // 2).repeat(1, 1, 2)
        else:
            p = left * torch.logspace(0, -d, r, dtype=torch.float64) @ right.mT
        columns = METHODS[method](FORMATS[form](p.float())).double()
        error = (columns.mT @ columns - torch.eye(r, dtype=torch.float64)).abs().amax().item()
        errors[f"10^{d}"] = error if np.isfinite(error) else np.inf
    return errors


class PowerSGDByMethod(PowerSGD):
    """PowerSGD with one of `METHODS`."""

    def __init__(self, config: PowerSGDConfig, method: str) -> None:
        super().__init__(config)
        self.method = method

    def orthonormal(self, p: Float[Tensor, "k m r"]) -> Float[Tensor, "k m r"]:
        return METHODS[self.method](p)


@experiment(
    "Householder's reflections, with eps I added, keep columns orthonormal where Gram-Schmidt loses them",
    "Ramesh et al. 2021, §2.5, App. E.2 step 5",
)
def householder(folder: Path, quick: bool) -> Finding:
    """Measure each method's error on nearly parallel columns of P, and its training loss.

    Gram-Schmidt subtracts from each column its projections onto the previous columns. If columns are nearly parallel,
    the remainder is rounding error and the result is not orthogonal. The error grows with the square of P's condition
    number in the classical variant, and linearly in the modified one. Householder reflections stay orthogonal, and
    eps I gives P full rank. Without orthogonal columns P Q^T is not a projection: parts of the gradient count twice,
    and the error buffers hold the opposite.
    """
    seeds, digits = range(1, 2 if quick else 5), (0, 4, None) if quick else (*range(9), None)
    labels = {(method, form): {"method": method, "form": form} for method in METHODS for form in FORMATS}
    products = Sweep(folder, orthonormality, labels, seeds, digits=digits)
    reducers = {method: partial(PowerSGDByMethod, PowerSGDConfig(rank=24), method) for method in METHODS}
    grid = {name: {"reducer": reducer} for name, reducer in {"uncompressed": Fp32Reducer, **reducers}.items()}
    trained = Sweep(folder, replicas.trial, grid, seeds, steps=10 if quick else 300, width=96)
    worst = {label: [runs.values(f"10^{d}").max() for d in digits] for label, runs in products.runs.items()}
    final = {method: f"{runs.losses().mean():.4f}" for method, runs in trained.runs.items()}
    largest = max(max(worst[list(METHODS)[-1], form]) for form in FORMATS)
    gram_schmidt = {name: max(worst[f"Gram-Schmidt, {name}", "fp32"]) for name in ("classical", "modified")}
    rows = [
        (method, form, *(f"{error:.1e}" for error in errors), final[method] if form == "1-6-9" else "-")
        for (method, form), errors in worst.items()
    ]
    rows.append(("uncompressed", "-", *("-" for _ in digits), final["uncompressed"]))
    return Finding(
        holds=bool(largest < 1e-5 and min(gram_schmidt.values()) > 1e-2),
        verdict=f"With Householder's reflections and {EPS:g} I, the inner products of two columns differ from "
        f"those of orthonormal ones by at most {largest:.1e}, with Gram-Schmidt by up to "
        + " and ".join(f"{error:.1e} ({name})" for name, error in gram_schmidt.items())
        + ". The last column shows the training loss.",
        header=("method", "P in", *("columns repeat" if d is None else f"condition number 10^{d}" for d in digits),
                "training loss"),
        rows=rows,
        curves={
            "log10 of the error, over log10 of the condition number, P in fp32": {
                method: [
                    (d, np.log10(max(error, 1e-12)).item())
                    for d, error in zip(digits, worst[method, "fp32"], strict=True)
                    if d is not None and np.isfinite(error)
                ]
                for method in METHODS
            },
            "loss, first seed": trained.curves,
        },
        settings=trained.settings | {"rank": 24},
    )  # fmt: skip
