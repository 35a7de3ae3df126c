"""Appendix D: rounding to 8 bits adds noise to an inner product, and the noise grows with the vectors' length.

For vectors of k independent numbers with variances s_u^2 and s_v^2, and rounding errors with variance s_q^2,

    Var <u^, v^> = Var <u, v> + k s_q^2 (s_u^2 + s_v^2 + s_q^2)        (12)

The maximum of uniform numbers does not depend on k, so neither does s_q, and the equation holds. The maximum of normal
numbers grows with k, and s_q with it, which the paper does not model.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import pairwise

import torch

from limner.experiments.report import Finding
from limner.experiments.sweep import Result, TrialRunner
from limner.numerics.formats import INT8_MAX
from limner.quantization.products import product
from limner.quantization.quantize import quantize

CLAIM = "The variance that 8-bit rounding adds to an inner product grows with its length, as equation 12 says"
SOURCE = "Wortsman et al. 2023, App. D.1"


@dataclass(frozen=True, kw_only=True)
class InnerProductSetting:
    """Inner products of all pairs from two sets of `vectors` vectors with `length` numbers."""

    length: int
    kind: str
    seed: int
    vectors: int = 256


def trial(setting: InnerProductSetting) -> Result:
    """Return the variance of the quantization error, measured and by equation 12."""
    torch.manual_seed(setting.seed)
    shape = (setting.vectors, setting.length)
    u, v = (torch.rand(shape) * 2 - 1 if setting.kind == "uniform" else torch.randn(shape) for _ in range(2))
    (a, scale_a), (b, scale_b) = quantize(u, by_row=True), quantize(v, by_row=True)
    error = product(a, b, scale_a, scale_b).double() - u.double() @ v.double().mT
    max_square = (u.abs().amax(1).square().mean() + v.abs().amax(1).square().mean()).item() / 2
    s_q = max_square / INT8_MAX**2 / 12  # error of rounding to multiples of the maximum / 127
    s_u = s_v = 1 / 3 if setting.kind == "uniform" else 1.0
    return {"measured": error.var().item(), "expected": setting.length * s_q * (s_u + s_v + s_q), "rounding": s_q}


def reproduce(trials: TrialRunner, quick: bool) -> Finding:
    """Compare the variance of products of increasing length with the paper's formula."""
    lengths = [4**n for n in range(3, 6 if quick else 9)]
    seeds = range(1 if quick else 5)
    kinds = ("uniform", "normal")
    settings = [InnerProductSetting(length=k, kind=kind, seed=s) for kind in kinds for k in lengths for s in seeds]
    results = iter(trials.run(trial, settings, "multiplying"))
    rows, curves, worst, growth = [], {}, 0.0, {}
    for kind in kinds:
        points = []
        for k in lengths:
            runs = [next(results) for _ in seeds]
            measured, expected, rounding = (sum(r[key] for r in runs) / len(runs) for key in runs[0])
            ratio = measured / expected
            worst = max(worst, abs(ratio - 1))
            points.append((k, measured))
            rows.append((kind, k, f"{measured:.4g}", f"{expected:.4g}", f"{ratio:.3f}", f"{rounding:.3g}"))
        curves[kind] = [(math.log2(k), math.log2(value)) for k, value in points]
        growth[kind] = [later / earlier for (_, earlier), (_, later) in pairwise(points)]
    holds = worst < 0.05 and min(map(min, growth.values())) > 3.5
    return Finding(
        name="quantization-variance",
        claim=CLAIM,
        source=SOURCE,
        holds=holds,
        verdict=f"Measured and expected variance differ by {worst:.1%} at most. Vectors four times as long have "
        f"{min(growth['uniform']):.2f} to {max(growth['uniform']):.2f} times the variance with uniform numbers, and "
        f"{min(growth['normal']):.2f} to {max(growth['normal']):.2f} times with normal numbers, whose maximum grows "
        "with the length.",
        header=("numbers", "length k", "variance added", "equation 12", "ratio", "s_q^2"),
        rows=rows,
        curves={"log2 of the variance added, over log2 of the length": curves},
        settings={"seeds": list(seeds), **asdict(settings[0])},
    )
