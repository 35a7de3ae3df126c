"""Section 2.5 and App. E.2 step 5: orthonormal columns of P by Householder reflections instead of Gram-Schmidt.

Gram-Schmidt subtracts from each column its projections onto the previous columns. If columns are nearly parallel, the
remainder is rounding error and the result is not orthogonal. The error grows with the square of P's condition number in
the classical variant, and linearly in the modified one. Householder reflections stay orthogonal, and eps I gives P full
rank. Without orthogonal columns P Q^T is not a projection: parts of the gradient count twice, and the error buffers
hold the opposite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from limner.distributed.gradient_reducers import GradientReducer, Plain
from limner.distributed.powersgd import EPS, PowerSGD, PowerSGDConfig, orthonormal
from limner.numerics.formats import E6M9
from limner.reproduce.report import Finding
from limner.reproduce.sweep import Result, Trials

CLAIM = "Householder's reflections, with eps I added, keep columns orthonormal where Gram-Schmidt loses them"
SOURCE = "Ramesh et al. 2021, §2.5, App. E.2 step 5"

_LAST = 50  # last updates whose loss is averaged


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


def reflections(p: Float[Tensor, "k m r"]) -> Float[Tensor, "k m r"]:
    """Householder reflections without eps I."""
    return orthonormal(p, eps=0.0)


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "Gram-Schmidt, classical": classical,
    "Gram-Schmidt, modified": modified,
    "Householder": reflections,
    f"Householder, {EPS:g} I added": orthonormal,
}


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Settings of matrices P with condition number 10^`digits`. With `digits` None, columns are repeated."""

    digits: int | None
    seed: int
    matrices: int = 8
    m: int = 256
    r: int = 32


def trial(of: Columns) -> Result:
    """Return the largest entry of |P^T P - I| for each method, for P in fp32 and in 1-6-9."""
    generator = torch.Generator().manual_seed(of.seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(of.matrices, *shape, generator=generator, dtype=torch.float64)

    left, right = torch.linalg.qr(draw(of.m, of.r))[0], torch.linalg.qr(draw(of.r, of.r))[0]
    if of.digits is None:
        p = draw(of.m, of.r // 2).repeat(1, 1, 2)
    else:
        p = left * torch.logspace(0, -of.digits, of.r, dtype=torch.float64) @ right.mT
    found = {}
    for form, values in {"fp32": p.float(), "1-6-9": E6M9.rounded(p.float())}.items():
        for name, way in WAYS.items():
            columns = way(values).double()
            error = (columns.mT @ columns - torch.eye(of.r, dtype=torch.float64)).abs().amax().item()
            found[f"{name}/{form}"] = error if np.isfinite(error) else None
    return found


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a small prior with two replicas; `way` is one of `WAYS`, or "uncompressed"."""

    way: str
    seed: int
    steps: int
    rank: int = 24
    width: int = 96


def training(of: Training) -> Result:
    """Return the losses, and the number of skipped updates."""
    from limner.reproduce import replicas

    class Other(PowerSGD):
        def orthonormal(self, p: Float[Tensor, "k m r"]) -> Float[Tensor, "k m r"]:
            return WAYS[of.way](p)

    def make() -> GradientReducer:
        return Plain() if of.way == "uncompressed" else Other(PowerSGDConfig(rank=of.rank))

    trained = replicas.train(make, width=of.width, steps=of.steps, seed=of.seed)
    return {"loss": trained.loss.tolist(), "skipped": trained.run.skipped}


def reproduce(trials: Trials, quick: bool) -> Finding:
    """Measure each method's error on nearly parallel columns, and its training loss."""
    digits = (0, 4, None) if quick else (0, 1, 2, 3, 4, 5, 6, 7, 8, None)
    seeds, steps = range(1, 2 if quick else 5), 10 if quick else 300
    settings = [Columns(digits=digit, seed=seed) for digit in digits for seed in seeds]
    results = iter(trials.run(trial, settings, "orthonormal columns"))
    worst: dict[str, list[float]] = {f"{name}/{form}": [] for name in WAYS for form in ("fp32", "1-6-9")}
    for _ in digits:
        some = [next(results) for _ in seeds]
        for key, values in worst.items():
            values.append(max(np.inf if r[key] is None else r[key] for r in some))
    ways = ["uncompressed", *WAYS]
    runs = [Training(way=way, seed=seed, steps=steps) for way in ways for seed in seeds]
    trained = iter(trials.run(training, runs, "training priors"))
    losses = {way: [next(trained) for _ in seeds] for way in ways}
    last = {way: float(np.mean([np.mean(r["loss"][-_LAST:]) for r in some])) for way, some in losses.items()}
    named = [f"10^{digit}" if digit is not None else "columns repeat" for digit in digits]
    rows: list[tuple[object, ...]] = [
        (
            name,
            form,
            *(f"{value:.1e}" for value in worst[f"{name}/{form}"]),
            f"{last[name]:.4f}" if form == "1-6-9" else "-",
        )
        for name in WAYS
        for form in ("fp32", "1-6-9")
    ]
    rows.append(("uncompressed", "-", *("-" for _ in digits), f"{last['uncompressed']:.4f}"))
    ours = max(max(worst[f"{list(WAYS)[-1]}/{form}"]) for form in ("fp32", "1-6-9"))
    others = {name: max(worst[f"{name}/fp32"]) for name in list(WAYS)[:2]}
    return Finding(
        name="householder",
        claim=CLAIM,
        source=SOURCE,
        holds=ours < 1e-5 and min(others.values()) > 1e-2,
        verdict=f"With Householder's reflections and {EPS:g} I products of two columns differ from those of "
        f"orthonormal ones by {ours:.1e} at most; with Gram-Schmidt by up to "
        + " and ".join(f"{value:.1e} ({name.split(', ')[1]})" for name, value in others.items())
        + ". What it does to a training's loss is in the last column.",
        header=(
            "way",
            "P in",
            *(f"condition number {name}" if name[0] == "1" else name for name in named),
            "loss of a training",
        ),
        rows=rows,
        curves={
            "log10 of the error, over log10 of the condition number, P in fp32": {
                name: [
                    (float(digit), float(np.log10(max(value, 1e-12))))
                    for digit, value in zip(digits, worst[f"{name}/fp32"], strict=True)
                    if digit is not None and np.isfinite(value)
                ]
                for name in WAYS
            },
            "loss, first seed": {way: list(enumerate(some[0]["loss"])) for way, some in losses.items()},
        },
        settings={"seeds": list(seeds), **{k: v for k, v in asdict(runs[0]).items() if k not in ("way", "seed")}},
    )
