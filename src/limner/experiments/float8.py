"""Training in tensor-wise float8 with small features (Wortsman et al. 2023, §2.3), and with delayed scales."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from limner.experiments.recorders import MagnitudeRecorder
from limner.experiments.report import Finding, experiment
from limner.experiments.sweep import Result, Sweep, all_above, over_seeds, span
from limner.experiments.tiny_models import CLIP, NUM_SCENES, accuracy, train_clip
from limner.models.contrastive import CLIPConfig
from limner.models.transformer import LayerScale
from limner.quantization.low_precision import Fp8TensorWiseLinear
from limner.quantization.precisions import Fp8TensorWise
from limner.quantization.products import product
from limner.quantization.quantize import E4M3, E5M2, round_to_float8, scale_and_inverse
from limner.training.hooks import Hook
from limner.training.train_state import TrainState


class _DelayedFunction(torch.autograd.Function):
    """The three products of a `DelayedScalingLinear`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Any) -> Tensor:
        (q, scale_x), (w, scale_w) = layer.cast("input", x, E4M3), layer.cast("weight", weight, E4M3)
        ctx.save_for_backward(q, scale_x, w, scale_w)
        ctx.layer, ctx.dtype = layer, weight.dtype
        return product(q, w, scale_x, scale_w, bias, x.dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        g, (q, scale_x, w, scale_w) = upstream[0], ctx.saved_tensors
        h, scale_g = ctx.layer.cast("gradient", g, E5M2)
        by_x = product(h, w.mT, scale_g, scale_w, None, g.dtype)
        by_weight = product(h.mT, q.mT, scale_g, scale_x, None, ctx.dtype)
        return by_x, by_weight, g.sum(0).to(ctx.dtype) if ctx.needs_input_grad[2] else None, None


class DelayedScalingLinear(Fp8TensorWiseLinear):
    """`Fp8TensorWiseLinear` whose scales come from moving averages of the maxima of earlier steps, so that no pass over
    a tensor precedes its conversion. Larger numbers become the largest of the format.

    Attributes:
        maxima: moving averages of the largest magnitude of input, weight and gradient.
    """

    DECAY = 0.9

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.maxima: dict[str, Tensor] = {}

    def cast(self, role: str, x: Float[Tensor, "m n"], format: torch.dtype) -> tuple[Tensor, Float[Tensor, ""]]:
        """Return x in a format with its scale, and in training record the maximum. The first scale is that of x."""
        absmax = x.detach().abs().amax().float()
        average = self.maxima.setdefault(role, absmax)
        if self.training:
            self.maxima[role] = absmax.lerp(average, self.DECAY)
        scale, inverse = scale_and_inverse(average, torch.finfo(format).max)
        return round_to_float8(x.float() * inverse, format), scale

    def _multiply(self, x: Float[Tensor, "b n"]) -> Float[Tensor, "b m"]:
        return _DelayedFunction.apply(x, self.weight, self.bias, self)  # type: ignore[no-any-return]


class DelayedScaling(Fp8TensorWise):
    """`Fp8TensorWise` with scales from earlier steps."""

    layer = DelayedScalingLinear


@dataclass(frozen=True, kw_only=True)
class LayerScaleConfig(CLIPConfig):
    """CLIP with layer-scale from `gain`."""

    gain: float

    def build(self) -> Any:
        model = super().build()
        for module in model.modules():
            if isinstance(module, LayerScale):
                nn.init.constant_(module.gain, self.gain)
        return model


def float8_trial(*, depth: int, qk_norm: bool = False, gain: float | None = None, **settings: Any) -> Result:
    """Return the losses, accuracy on new scenes, and magnitudes: the mean of each image block in the first and the last
    step (Figure 2, right), and mean and maximum of the last block and of the gradient of its MLP in each step (Figure
    11).

    Args:
        gain: initial layer-scale; None for a model without layer-scale.
    """
    model = replace(CLIP, depth=depth, qk_norm=qk_norm)
    if gain is not None:
        model = LayerScaleConfig(**asdict(replace(model, layer_scale=True)), gain=gain)
    recorders: list[MagnitudeRecorder] = []
    weight = f"image_blocks.{depth - 1}.mlp.branch.up.weight"

    def make_hooks(run: TrainState) -> list[Hook]:
        recorders.append(MagnitudeRecorder(run, weight))
        return [*recorders]

    run, losses = train_clip(model=model, hooks=make_hooks, **settings)
    features, gradients = recorders[0].features, recorders[0].gradients[weight]
    return {
        "loss": losses,
        "accuracy": accuracy(run.model),
        "begin": [mean for mean, _ in features[0]],
        "end": [mean for mean, _ in features[-1]],
        "last block": [blocks[-1] for blocks in features],
        "gradient": gradients,
    }


@experiment(
    "Tensor-wise float8 diverges or falls behind where layer-scale from zero, 1e-6 or 1e-4 trains, since features stay "
    "small",
    "Wortsman et al. 2023, §2.3, Figures 2 and 11",
)
def fp8_layerscale(folder: Path, quick: bool) -> Finding:
    """Compare float8 and fp32, each with and without layer-scale, and float8 with the paper's other remedies.

    With one scale per matrix a few large values round the others towards zero. The features of a residual network grow
    from block to block. Layer-scale multiplies each block's output by a learned vector, initially zero or small:
    features stay small, and the same float8 trains. The models are deeper than in the other findings.
    """
    seeds, steps, depth, count = (range(1), 3, 2, 256) if quick else (range(3), 250, 8, NUM_SCENES)
    float8, gains = {"precision": Fp8TensorWise()}, (0.0, 1e-6, 1e-4)
    grid = {
        "fp32": {},
        "float8": float8,
        "float8, clipped": {**float8, "clip_norm": 1.0},
        "float8, q and k normalized": {**float8, "qk_norm": True},
        "fp32, layer-scale from 0": {"gain": 0.0},
        **{f"float8, layer-scale from {gain:g}": {**float8, "gain": gain} for gain in gains},
    }
    sweep = Sweep(folder, float8_trial, grid, seeds, steps=steps, depth=depth, batch=64, count=count, lr=4e-3)
    losses = {kind: runs.losses() for kind, runs in sweep.runs.items()}
    gap = losses["float8"] - losses["fp32"]
    scaled_gaps = {g: losses[f"float8, layer-scale from {g:g}"] - losses["fp32, layer-scale from 0"] for g in gains}
    plain, scaled = sweep.runs["fp32"], sweep.runs["fp32, layer-scale from 0"]
    growth = plain.values("end")[:, -1] - scaled.values("end")[:, -1]
    named = {"without layer-scale": plain, "with": scaled}
    return sweep.finding(
        all_above([over_seeds(x, ".3f") for x in (gap, growth, *(gap - scaled for scaled in scaled_gaps.values()))]),
        f"float8 changes the loss by {over_seeds(gap, '.3f')} without layer-scale and by "
        + ", ".join(f"{over_seeds(x, '.3f')} with it from {gain:g}" for gain, x in scaled_gaps.items())
        + f". After the last block, features have a mean magnitude of {plain.values('end')[:, -1].mean():.2f} without "
        f"and {scaled.values('end')[:, -1].mean():.2f} with it at the end of training.",
        ("training",),
        {
            "loss": lambda runs: f"{runs.losses().mean():.3f}",
            "of seeds": lambda runs: span(runs.losses(), ".3f"),
            "accuracy among 64": lambda runs: f"{runs.mean('accuracy'):.1%}",
            "last features at the beginning": lambda runs: f"{runs.values('begin')[:, -1].mean():.2f}",
            "at the end": lambda runs: f"{runs.values('end')[:, -1].mean():.2f}",
        },
        {
            "loss, first seed": sweep.curves,
            "mean magnitude of features, over blocks": {
                f"{name}, {time}": list(enumerate(runs.values(time).mean(0).tolist()))
                for name, runs in named.items()
                for time in ("begin", "end")
            },
            **{
                f"log2 of the {key}, first seed": {
                    f"{statistic}, {name}": list(enumerate(np.log2(np.maximum(values, 2.0**-40)).tolist()))
                    for name, runs in named.items()
                    for statistic, values in zip(("mean", "max"), np.transpose(runs.results[0][key]), strict=True)
                }
                for key in ("last block", "gradient")
            },
        },
    )
