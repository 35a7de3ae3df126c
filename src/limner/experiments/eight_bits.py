"""Training in 8 bits (Wortsman et al. 2023): accuracy in int8 and float8 (§2), and the noise of rounding (App. D)."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from limner.evaluation.confidence import Estimate
from limner.experiments.report import Finding, experiment
from limner.experiments.sweep import Result, Sweep, all_above, over_seeds, span
from limner.experiments.tiny_models import CLIP, accuracy, scenes, train_clip
from limner.numerics.precision import Bf16
from limner.objectives.hard_negatives import HardNegativeLoss
from limner.quantization.convert import convert
from limner.quantization.precisions import Fp8TensorWise, LLMInt8, SwitchBack, in_blocks
from limner.quantization.products import product
from limner.quantization.quantize import quantize

INT8 = {"SwitchBack": SwitchBack(), "LLM.int8()": LLMInt8()}


def int8_trial(*, batches: tuple[int, ...] = (), **settings: Any) -> Result:
    """Return the losses, accuracy on new scenes, and the errors of int8 gradients for some sizes of a batch.

    The error of a gradient is relative (L2 norm); the worst block matrix counts.
    """
    run, losses = train_clip(model=replace(CLIP, patch_dropout=0.0), **settings)  # use all positions
    errors = {name: [] for name in INT8}
    correct = accuracy(run.model)
    for size in batches:
        exact = gradients(run.model, size)
        for name, precision in INT8.items():
            rounded = gradients(convert(copy.deepcopy(run.model), precision.layer.from_linear, in_blocks), size)
            errors[name].append(max(((rounded[k] - exact[k]).norm() / exact[k].norm()).item() for k in exact))
    return {"loss": losses, "accuracy": correct, "errors": errors}


def gradients(model: Any, batch: int) -> dict[str, Tensor]:
    """Return the gradients of the block matrices on the first `batch` scenes."""
    pictures, tokens = scenes()
    model.zero_grad()
    loss, _ = HardNegativeLoss()(model, {"pixels": pictures[:batch], "text": tokens[:batch]}, 0, None)
    loss.backward()
    parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
    return {
        name: p.grad.clone()
        for name, p in parameters.items()
        if "blocks." in name and p.grad is not None and p.ndim > 1
    }


def as_accurate(gain: Estimate, lead: Estimate) -> bool | None:
    """Return True if SwitchBack's gain over bf16 is not below 0, and its lead over LLM.int8() is above 0."""
    return False if all_above([gain]) is False else all_above([lead])


@experiment(
    "Models trained with SwitchBack in int8 are as accurate as with bf16; with LLM.int8() they are less accurate",
    "Wortsman et al. 2023, §2.2, Figure 1",
)
def switchback_accuracy(folder: Path, quick: bool) -> Finding:
    """Compare SwitchBack, and LLM.int8(), which also computes the weight gradient in int8, with bf16.

    The weight gradient sums over all positions of a batch, so it accumulates the most rounding error (Appendix D): the
    difference grows with the batch. The gradient error of both is also measured directly: int8 against fp32 gradients
    of one batch, on models trained in bf16.
    """
    seeds, steps, batch, sizes = (range(1), 8, 32, (16, 32)) if quick else (range(4), 400, 128, (64, 256, 1_024))
    grid: dict[str, dict[str, Any]] = {"bf16": {"precision": Bf16(), "batches": sizes}}
    grid |= {kind: {"precision": precision} for kind, precision in INT8.items()}
    sweep = Sweep(folder, int8_trial, grid, seeds, steps=steps, batch=batch, lr=2e-3)
    bf16 = sweep.runs["bf16"]
    switchback, llm_int8 = (sweep.runs[kind].values("accuracy") - bf16.values("accuracy") for kind in INT8)
    gain, lead = over_seeds(switchback, ".1%"), over_seeds(switchback - llm_int8, ".1%")
    errors = {kind: np.mean([result["errors"][kind] for result in bf16.results], 0).tolist() for kind in INT8}
    return sweep.finding(
        as_accurate(gain, lead),
        f"The accuracy with SwitchBack, less that with bf16, is {gain}; less that with LLM.int8(), {lead}. The worst "
        f"matrix's gradient has a relative error of {errors['LLM.int8()'][0]:.0%} with LLM.int8() and "
        f"{errors['SwitchBack'][0]:.0%} with SwitchBack for {sizes[0]} samples, {errors['LLM.int8()'][-1]:.0%} and "
        f"{errors['SwitchBack'][-1]:.0%} for {sizes[-1]:,}.",
        ("products",),
        {
            "training loss": lambda runs: f"{runs.losses().mean():.3f}",
            "accuracy among 64": lambda runs: f"{runs.mean('accuracy'):.1%}",
            "of seeds": lambda runs: span(runs.values("accuracy"), ".1%"),
            **{
                f"gradient error, {size:,}": lambda runs, i=i: "-" if runs is bf16 else f"{errors[runs.label][i]:.1%}"
                for i, size in enumerate(sizes)
            },
        },
        {
            "loss, first seed": sweep.curves,
            "relative error of the worst gradient, over log2 of the batch": {
                kind: list(zip(np.log2(sizes).tolist(), values, strict=True)) for kind, values in errors.items()
            },
        },
    )


def float8_trial(*, depth: int, qk_norm: bool = False, layer_scale: bool = False, **settings: Any) -> Result:
    """Return the losses, accuracy on new scenes, and each image block's mean feature magnitude (Figure 2, right)."""
    model = replace(CLIP, depth=depth, qk_norm=qk_norm, layer_scale=layer_scale)
    run, losses = train_clip(model=model, **settings)
    trained: Any = run.model
    result = {"loss": losses, "accuracy": accuracy(trained), "features": []}
    for block in trained.image_blocks:
        block.register_forward_hook(lambda _, args, x: result["features"].append(x.abs().mean().item()))
    with torch.no_grad():
        trained.eval().encode_image(scenes()[0][:256])
    return result


@experiment(
    "Tensor-wise float8 diverges or falls behind where layer-scale from zero trains, since features stay small",
    "Wortsman et al. 2023, §2.3, Figure 2",
)
def fp8_layerscale(folder: Path, quick: bool) -> Finding:
    """Compare float8 and fp32, each with and without layer-scale, and float8 with the paper's other remedies.

    With one scale per matrix a few large values round the others towards zero. The features of a residual network grow
    from block to block. Layer-scale multiplies each block's output by a learned vector, initially zero: features stay
    small, and the same float8 trains. The models are deeper than in the other findings.
    """
    seeds, steps, depth = (range(1), 8, 2) if quick else (range(2), 400, 8)
    float8 = {"precision": Fp8TensorWise()}
    grid = {
        "fp32": {},
        "float8": float8,
        "float8, clipped": {**float8, "clip_norm": 1.0},
        "float8, q and k normalized": {**float8, "qk_norm": True},
        "fp32, layer-scale": {"layer_scale": True},
        "float8, layer-scale": {**float8, "layer_scale": True},
    }
    sweep = Sweep(folder, float8_trial, grid, seeds, steps=steps, depth=depth, batch=64, lr=4e-3)
    losses = {kind: runs.losses() for kind, runs in sweep.runs.items()}
    gap = losses["float8"].mean() - losses["fp32"].mean()
    scaled_gap = losses["float8, layer-scale"].mean() - losses["fp32, layer-scale"].mean()
    plain, scaled = (sweep.runs[kind].values("features").mean(0) for kind in ("fp32", "fp32, layer-scale"))
    float8_fails = losses["float8"].min() > losses["fp32"].max() and gap > 2 * max(scaled_gap, 0)
    return sweep.finding(
        bool(float8_fails and scaled[-1] < plain[-1]),
        f"float8 changes the loss by {gap:+.3f} without layer-scale and {scaled_gap:+.3f} with it. Features "
        f"after the last block have a mean magnitude of {plain[-1]:.2f} without and {scaled[-1]:.2f} with it, after "
        f"the first {plain[0]:.2f} and {scaled[0]:.2f}.",
        ("training",),
        {
            "loss": lambda runs: f"{runs.losses().mean():.3f}",
            "of seeds": lambda runs: span(runs.losses(), ".3f"),
            "accuracy among 64": lambda runs: f"{runs.mean('accuracy'):.1%}",
            "features after the last block": lambda runs: f"{runs.values('features')[:, -1].mean():.2f}",
        },
        {
            "loss, first seed": sweep.curves,
            "mean magnitude of features, over blocks": {
                "without layer-scale": list(enumerate(plain.tolist())),
                "with": list(enumerate(scaled.tolist())),
            },
        },
    )


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
