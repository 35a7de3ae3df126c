"""Training in 8 bits (Wortsman et al. 2023): accuracy over model sizes (§2.2), and the noise of rounding (App. D)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from limner.experiments.float8 import DelayedScaling
from limner.experiments.report import Finding, experiment
from limner.experiments.sweep import Result, Sweep, all_above, over_seeds, span
from limner.experiments.tiny_models import NUM_SCENES, accuracy, resized_clip, scenes, train_clip
from limner.numerics.precision import Bf16, Fp32
from limner.objectives.hard_negatives import HardNegativeLoss
from limner.optim.optimizers import StableAdamWConfig
from limner.quantization.low_precision import to_linear
from limner.quantization.precisions import Fp8SwitchBack, Fp8TensorWise, LLMInt8, SwitchBack, SwitchBackM, SwitchBackQ
from limner.quantization.products import product
from limner.quantization.quantize import quantize

#: Precisions by the name of their products.
INT8 = {
    "bf16": Bf16(), "SwitchBack": SwitchBack(), "SwitchBackM": SwitchBackM(), "SwitchBackQ": SwitchBackQ(),
    "LLM.int8()": LLMInt8(),
}  # fmt: skip
FLOAT8 = {
    "bf16": Bf16(), "SwitchBack": Fp8SwitchBack(), "tensor-wise": Fp8TensorWise(), "delayed scales": DelayedScaling()
}  # fmt: skip
SIZES = {32: 2, 64: 3, 96: 3}  # depth by width
MARGIN = 0.02  # a smaller loss of accuracy counts as none


def accuracy_trial(*, width: int, depth: int, batch: int, **settings: Any) -> Result:
    """Return the losses, accuracy on new scenes, and for eight batches together the bytes saved for the backward pass
    and the error of the gradients.

    The error of a gradient is relative to that of the same model in fp32 (L2 norm); the worst block matrix counts.
    """
    optimizer = StableAdamWConfig(lr=2e-3, weight_decay=0.2)
    run, losses = train_clip(model=resized_clip(width, depth), optimizer=optimizer, batch=batch, **settings)
    result = {"loss": losses, "accuracy": accuracy(run.model)}
    rounded, saved = gradients(run.model.eval(), run.config.precision, 8 * batch)
    exact, _ = gradients(to_linear(run.model), Fp32(), 8 * batch)
    error = max(((rounded[name] - exact[name]).norm() / exact[name].norm()).item() for name in exact)
    return result | {"saved": saved, "error": error}


def gradients(model: Any, precision: Fp32, batch: int) -> tuple[dict[str, Tensor], int]:
    """Return the gradients of the block matrices on the first `batch` scenes, and the bytes saved for the backward pass
    without parameters."""
    pictures, tokens = scenes(batch)
    model.zero_grad()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), precision.autocast("cpu"):
        loss, _ = HardNegativeLoss()(model, {"pixels": pictures, "text": tokens}, 0, None)
    loss.backward()
    parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
    by_name = {
        name: p.grad.clone()
        for name, p in parameters.items()
        if "blocks." in name and p.grad is not None and p.ndim > 1
    }
    return by_name, sum(size for pointer, size in sizes.items() if pointer not in own)


def run_sizes(folder: Path, quick: bool, precisions: Mapping[str, Any]) -> Sweep:
    """Train models of several sizes in each precision, with patch dropout and StableAdamW as in the paper."""
    seeds, sizes, settings = range(3), SIZES, {"steps": 300, "batch": 128, "count": NUM_SCENES}
    if quick:
        seeds, sizes, settings = range(1), {16: 1, 32: 2}, {"steps": 3, "batch": 16, "count": 128}
    grid = {
        (name, width): {"precision": precision, "width": width, "depth": depth}
        for width, depth in sizes.items()
        for name, precision in precisions.items()
    }
    return Sweep(folder, accuracy_trial, grid, seeds, **settings)


def lost_accuracy(sweep: Sweep) -> dict[str, list[np.ndarray]]:
    """Return the accuracy lost against bf16, [S] for each size from the smallest, by the name of the products."""
    lost: dict[str, list[np.ndarray]] = {}
    for (name, width), runs in sweep.runs.items():
        if name != "bf16":
            lost.setdefault(name, []).append(sweep.runs["bf16", width].values("accuracy") - runs.values("accuracy"))
    return lost


def size_finding(sweep: Sweep, matching: Sequence[str], failing: str, more: str = "") -> Finding:
    """Return the finding that the products `matching` lose no accuracy against bf16 at any size, and `failing` loses
    more in the largest models than in the smallest. `more` is a further sentence of the verdict."""
    lost, (*_, largest) = lost_accuracy(sweep), (width for _, width in sweep.runs)
    names = dict.fromkeys(name for name, _ in sweep.runs)
    growth = over_seeds(lost[failing][-1] - lost[failing][0], ".1%")
    return sweep.finding(
        all_above([growth, *(over_seeds(MARGIN - x, ".1%") for name in matching for x in lost[name])]),
        f"Accuracy lost against bf16, from the smallest to the largest models (up to {MARGIN:.0%} counts as none): "
        + "; ".join(f"{name} {', '.join(str(over_seeds(x, '.1%')) for x in values)}" for name, values in lost.items())
        + f". {failing} loses {growth} more in the largest than in the smallest.{more}",
        ("products", "width"),
        {
            "training loss": lambda runs: f"{runs.losses().mean():.3f}",
            "accuracy among 64": lambda runs: f"{runs.mean('accuracy'):.1%}",
            "of seeds": lambda runs: span(runs.values("accuracy"), ".1%"),
            "saved for backward, MB": lambda runs: f"{runs.mean('saved') / 1e6:.1f}",
            "error of the worst gradient": lambda runs: f"{runs.mean('error'):.1%}",
        },
        {
            "accuracy over width": {
                name: [(width, runs.mean("accuracy")) for (other, width), runs in sweep.runs.items() if other == name]
                for name in names
            },
            f"loss at width {largest}, first seed": {name: sweep.runs[name, largest].curve for name in names},
        },
    )


@experiment(
    "SwitchBack, M and Q are as accurate in int8 as bf16 at each model size; LLM.int8() loses more in larger models",
    "Wortsman et al. 2023, §2.2, Figures 1 (left) and 9",
)
def switchback_accuracy(folder: Path, quick: bool) -> Finding:
    """Compare SwitchBack, its variants that save int8 (M) or scale weights by row (Q), and LLM.int8(), which also
    computes the weight gradient in int8, with bf16.

    The weight gradient sums over all positions of a batch, so it accumulates the most rounding error (Appendix D).
    """
    sweep = run_sizes(folder, quick, INT8)
    (*_, width) = (width for _, width in sweep.runs)
    memory = sweep.runs["SwitchBackM", width].mean("saved") / sweep.runs["SwitchBack", width].mean("saved")
    more = f" At width {width}, SwitchBackM stores {memory:.0%} of SwitchBack's bytes for the backward pass."
    return size_finding(sweep, ("SwitchBack", "SwitchBackM", "SwitchBackQ"), "LLM.int8()", more)


@experiment(
    "SwitchBack in float8 is as accurate as bf16 at each model size; tensor-wise float8 loses more in larger models",
    "Wortsman et al. 2023, §2.2.3 and §2.3, Figures 1 (right) and 9",
)
def fp8_accuracy(folder: Path, quick: bool) -> Finding:
    """Compare SwitchBack and tensor-wise float8 with bf16. Tensor-wise scales are those of the current tensor, or
    delayed: from a moving average of earlier maxima, which the paper expects to do the same."""
    sweep = run_sizes(folder, quick, FLOAT8)
    lost = lost_accuracy(sweep)
    differences = (over_seeds(a - b, ".1%") for a, b in zip(lost["delayed scales"], lost["tensor-wise"], strict=True))
    more = f" Delayed scales lose {', '.join(map(str, differences))} more than current ones."
    return size_finding(sweep, ("SwitchBack",), "tensor-wise", more)


def inner_product_trial(*, kind: str, length: int, seed: int, vectors: int) -> Result:
    """Return the variance of the quantization error, measured and by equation 12.

    Inner products are those of all pairs from two sets of `vectors` vectors with `length` numbers.
    """
    torch.manual_seed(seed)
    shape = (vectors, length)
    u, v = (torch.rand(shape) * 2 - 1 if kind == "uniform" else torch.randn(shape) for _ in range(2))
    (a, scale_a), (b, scale_b) = quantize(u, by_row=True), quantize(v, by_row=True)
    error = product(a, b, scale_a, scale_b).double() - u.double() @ v.double().mT
    max_square = (u.abs().amax(1).square().mean() + v.abs().amax(1).square().mean()).item() / 2
    s_q = max_square / 127**2 / 12  # error of rounding to multiples of the maximum / 127
    s_u = s_v = 1 / 3 if kind == "uniform" else 1.0
    return {"measured": error.var().item(), "expected": length * s_q * (s_u + s_v + s_q), "rounding": s_q}


@experiment(
    "The variance that 8-bit rounding adds to an inner product grows with its length, as equation 12 says",
    "Wortsman et al. 2023, App. D.1",
)
def quantization_variance(folder: Path, quick: bool) -> Finding:
    """Compare the variance of products of increasing length with the paper's formula.

    For vectors of k independent numbers with variances s_u^2 and s_v^2, and rounding errors with variance s_q^2,

        Var <u^, v^> = Var <u, v> + k s_q^2 (s_u^2 + s_v^2 + s_q^2)        (12)

    The maximum of uniform numbers does not depend on k, so neither does s_q, and the equation holds. The maximum of
    normal numbers grows with k, and s_q with it, which the paper does not model.
    """
    kinds, lengths = ("uniform", "normal"), [4**n for n in range(3, 6 if quick else 9)]
    grid = {(kind, k): {"kind": kind, "length": k} for kind in kinds for k in lengths}
    sweep = Sweep(folder, inner_product_trial, grid, range(1 if quick else 5), vectors=256)

    measured, expected = (
        {label: runs.mean(key) for label, runs in sweep.runs.items()} for key in ("measured", "expected")
    )
    worst = max(abs(measured[label] / expected[label] - 1) for label in measured)
    growth = {kind: [measured[kind, b] / measured[kind, a] for a, b in pairwise(lengths)] for kind in kinds}
    return sweep.finding(
        worst < 0.05 and min(map(min, growth.values())) > 3.5,
        f"Measured and expected variance differ by {worst:.1%} at most. Vectors four times as long have "
        f"{min(growth['uniform']):.2f} to {max(growth['uniform']):.2f} times the variance with uniform numbers, and "
        f"{min(growth['normal']):.2f} to {max(growth['normal']):.2f} times with normal numbers, whose maximum grows "
        "with the length.",
        ("numbers", "length k"),
        {
            "variance added": lambda runs: f"{runs.mean('measured'):.4g}",
            "equation 12": lambda runs: f"{runs.mean('expected'):.4g}",
            "ratio": lambda runs: f"{runs.mean('measured') / runs.mean('expected'):.3f}",
            "s_q^2": lambda runs: f"{runs.mean('rounding'):.3g}",
        },
        {
            "log2 of the variance added, over log2 of the length": {
                kind: [(math.log2(k), math.log2(measured[kind, k])) for k in lengths] for kind in kinds
            }
        },
    )


@experiment(
    "8-bit rounding is most harmful to the weight gradient in CLIP models, and to the other products in LLaMA",
    "Wortsman et al. 2023, App. D.3",
)
def inner_dimensions(folder: Path, quick: bool) -> Finding:
    """Compare the variance that rounding adds to the three products of a linear layer, in the sizes of two models.

    The forward product and the gradient of the input sum over the layer's widths, the gradient of the weight over the
    tokens of a GPU: 256 pictures of 16 x 16 patches in ViT-Huge, 2,048 in LLaMA 65B. The paper divides the lengths
    (51.2 and 12.8 times in one model, 1/4 and 1/16 in the other). Here the variances of uniform numbers are measured.
    """
    sizes = {"CLIP ViT-Huge": (65_536, (1_280, 5_120)), "LLaMA 65B": (2_048, (8_192, 32_768))}
    shrink = 64 if quick else 1
    grid = {
        (model, product_name, k): {"kind": "uniform", "length": k // shrink}
        for model, (tokens, widths) in sizes.items()
        for product_name, k in (("weight gradient", tokens), *(("other product", width) for width in widths))
    }
    sweep = Sweep(folder, inner_product_trial, grid, range(1 if quick else 5), vectors=256)
    measured = {label: runs.mean("measured") for label, runs in sweep.runs.items()}
    ratios = {
        (model, k): (measured[model, "weight gradient", tokens] / measured[model, "other product", k], tokens / k)
        for model, (tokens, widths) in sizes.items()
        for k in widths
    }
    return sweep.finding(
        all(abs(found / paper - 1) < 0.1 for found, paper in ratios.values()),
        "The variance of the weight gradient is "
        + ", ".join(f"{found:.3g} times that of length {k:,} in {model}" for (model, k), (found, _) in ratios.items())
        + "; the paper's ratios of lengths are "
        + ", ".join(f"{paper:g}" for _, paper in ratios.values())
        + ".",
        ("model", "product", "length k"),
        {"variance added": lambda runs: f"{runs.mean('measured'):.4g}"},
        {},
        lengths_divided_by=shrink,
    )
