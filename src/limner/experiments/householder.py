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

from limner.distributed.gradient_reducers import Fp32Reducer
from limner.distributed.powersgd import EPS, PowerSGD, PowerSGDConfig, orthonormal
from limner.experiments.report import Finding
from limner.experiments.sweep import Result, TrialRunner
from limner.numerics.formats import E6M9

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


METHODS: dict[str, Callable[[Tensor], Tensor]] = {
    "Gram-Schmidt, classical": classical,
    "Gram-Schmidt, modified": modified,
    "Householder": reflections,
    f"Householder, {EPS:g} I added": orthonormal,
}


@dataclass(frozen=True, kw_only=True)
class ColumnsSetting:
    """Matrices P with condition number 10^`digits`. With `digits` None, columns are repeated."""

    digits: int | None
    seed: int
    matrices: int = 8
    m: int = 256
    r: int = 32


def trial(setting: ColumnsSetting) -> Result:
    """Return the largest entry of |P^T P - I| for each method, for P in fp32 and in 1-6-9."""
    generator = torch.Generator().manual_seed(setting.seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(setting.matrices, *shape, generator=generator, dtype=torch.float64)

    left, right = torch.linalg.qr(draw(setting.m, setting.r))[0], torch.linalg.qr(draw(setting.r, setting.r))[0]
    if setting.digits is None:
        p = draw(setting.m, setting.r // 2).repeat(1, 1, 2)
    else:
        p = left * torch.logspace(0, -setting.digits, setting.r, dtype=torch.float64) @ right.mT
    errors = {}
    for form, values in {"fp32": p.float(), "1-6-9": E6M9.round(p.float())}.items():
        for name, method in METHODS.items():
            columns = method(values).double()
            error = (columns.mT @ columns - torch.eye(setting.r, dtype=torch.float64)).abs().amax().item()
            errors[f"{name}/{form}"] = error if np.isfinite(error) else None
    return errors


@dataclass(frozen=True, kw_only=True)
class HouseholderSetting:
    """Settings of a small prior with two replicas; `method` is a key of `METHODS`, or "uncompressed"."""

    method: str
    seed: int
    steps: int
    rank: int = 24
    width: int = 96


def train(setting: HouseholderSetting) -> Result:
    """Return the losses, and the number of skipped updates."""
    from limner.experiments import replicas

    class PowerSGDWithMethod(PowerSGD):
        def orthonormal(self, p: Float[Tensor, "k m r"]) -> Float[Tensor, "k m r"]:
            return METHODS[setting.method](p)

    def make_reducer() -> Fp32Reducer:
        return (
            Fp32Reducer() if setting.method == "uncompressed" else PowerSGDWithMethod(PowerSGDConfig(rank=setting.rank))
        )

    trained = replicas.train(make_reducer, width=setting.width, steps=setting.steps, seed=setting.seed)
    return {"loss": trained.loss.tolist(), "skipped": trained.run.skipped}


def reproduce(trials: TrialRunner, quick: bool) -> Finding:
    """Measure each method's error on nearly parallel columns, and its training loss."""
    digits = (0, 4, None) if quick else (0, 1, 2, 3, 4, 5, 6, 7, 8, None)
    seeds, steps = range(1, 2 if quick else 5), 10 if quick else 300
    settings = [ColumnsSetting(digits=digit, seed=seed) for digit in digits for seed in seeds]
    results = iter(trials.run(trial, settings, "orthonormal columns"))
    worst: dict[str, list[float]] = {f"{name}/{form}": [] for name in METHODS for form in ("fp32", "1-6-9")}
    for _ in digits:
        results_of_seeds = [next(results) for _ in seeds]
        for key, values in worst.items():
            values.append(max(np.inf if r[key] is None else r[key] for r in results_of_seeds))
    methods = ["uncompressed", *METHODS]
    train_settings = [HouseholderSetting(method=method, seed=seed, steps=steps) for method in methods for seed in seeds]
    trained = iter(trials.run(train, train_settings, "training priors"))
    losses = {method: [next(trained) for _ in seeds] for method in methods}
    final = {method: float(np.mean([np.mean(r["loss"][-_LAST:]) for r in runs])) for method, runs in losses.items()}
    conditions = [f"10^{digit}" if digit is not None else "columns repeat" for digit in digits]
    rows: list[tuple[object, ...]] = [
        (
            name,
            form,
            *(f"{value:.1e}" for value in worst[f"{name}/{form}"]),
            f"{final[name]:.4f}" if form == "1-6-9" else "-",
        )
        for name in METHODS
        for form in ("fp32", "1-6-9")
    ]
    rows.append(("uncompressed", "-", *("-" for _ in digits), f"{final['uncompressed']:.4f}"))
    householder = max(max(worst[f"{list(METHODS)[-1]}/{form}"]) for form in ("fp32", "1-6-9"))
    gram_schmidt = {name: max(worst[f"{name}/fp32"]) for name in list(METHODS)[:2]}
    return Finding(
        name="householder",
        claim=CLAIM,
        source=SOURCE,
        holds=householder < 1e-5 and min(gram_schmidt.values()) > 1e-2,
        verdict=f"With Householder's reflections and {EPS:g} I, the inner products of two columns differ from "
        f"those of orthonormal ones by at most {householder:.1e}, with Gram-Schmidt by up to "
        + " and ".join(f"{value:.1e} ({name.split(', ')[1]})" for name, value in gram_schmidt.items())
        + ". The last column shows the training loss.",
        header=(
            "method",
            "P in",
            *(f"condition number {name}" if name[0] == "1" else name for name in conditions),
            "training loss",
        ),
        rows=rows,
        curves={
            "log10 of the error, over log10 of the condition number, P in fp32": {
                name: [
                    (float(digit), float(np.log10(max(value, 1e-12))))
                    for digit, value in zip(digits, worst[f"{name}/fp32"], strict=True)
                    if digit is not None and np.isfinite(value)
                ]
                for name in METHODS
            },
            "loss, first seed": {method: list(enumerate(runs[0]["loss"])) for method, runs in losses.items()},
        },
        settings={"seeds": list(seeds), **{k: asdict(train_settings[0])[k] for k in ("steps", "rank", "width")}},
    )
