"""§2.3 and Figure 2: tensor-wise float8 fails if features are large, and layer-scale keeps features small.

With one scale per matrix a few large values round the others towards zero. The features of a residual network grow from
block to block. Layer-scale multiplies each block's output by a learned vector, initially zero: features stay small, and
the same float8 trains. Small contrastive models, deeper than in the other findings, train with products in fp32 and in
float8, with and without layer-scale, and with the paper's other remedies, gradient clipping and normalized queries and
keys.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import numpy as np
import torch

from limner.layers.precisions import Fp8TensorWise
from limner.models.contrastive import Contrastive
from limner.numerics.precision import Fp32
from limner.optim.optimizers import AdamWConfig
from limner.reproduce import tiny_clip
from limner.reproduce.report import Finding
from limner.reproduce.sweep import Result, Trials
from limner.reproduce.tiny_train import scenes

CLAIM = "Tensor-wise float8 diverges or falls behind where layer-scale from zero trains, since features stay small"
SOURCE = "Wortsman et al. 2023, §2.3, Figure 2"

_LAST = 50  # last steps whose loss is averaged
WAYS = {
    "fp32": {},
    "float8": {"fp8": True},
    "float8, clipped": {"fp8": True, "clip": 1.0},
    "float8, q and k normalised": {"fp8": True, "qk_norm": True},
    "fp32, layer-scale": {"layer_scale": True},
    "float8, layer-scale": {"fp8": True, "layer_scale": True},
}


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a small contrastive model."""

    seed: int
    steps: int
    depth: int
    fp8: bool = False
    clip: float | None = None
    qk_norm: bool = False
    layer_scale: bool = False
    batch: int = 64
    lr: float = 4e-3


def trial(of: Training) -> Result:
    """Return the losses, accuracy on new scenes, and each block's mean feature magnitude."""
    model = replace(tiny_clip.MODEL, depth=of.depth, qk_norm=of.qk_norm, layer_scale=of.layer_scale)
    trained = tiny_clip.train(
        of.steps, model=model, seed=of.seed, batch=of.batch, precision=Fp8TensorWise() if of.fp8 else Fp32(),
        optimizer=AdamWConfig(lr=of.lr, betas=(0.9, 0.98)), clip_norm=of.clip,
    )  # fmt: skip
    built = trained.run.model
    assert isinstance(built, Contrastive)
    return {"loss": trained.loss.tolist(), "accuracy": tiny_clip.accuracy(built), "features": features(built)}


@torch.no_grad()
def features(model: Contrastive) -> list[float]:
    """Return the mean magnitude of each image block's output (Figure 2, right)."""
    found: list[float] = []
    handles = [
        block.register_forward_hook(lambda _, args, x: found.append(x.abs().mean().item()))
        for block in model.image_blocks
    ]
    model.eval()
    model.encode_image(scenes()[0][:256])
    model.train()
    for handle in handles:
        handle.remove()
    return found


def reproduce(trials: Trials, quick: bool) -> Finding:
    """Compare float8 and fp32, each with and without layer-scale."""
    seeds, steps, depth = (range(1), 8, 2) if quick else (range(2), 400, 8)
    settings = [Training(seed=seed, steps=steps, depth=depth, **way) for way in WAYS.values() for seed in seeds]
    results = trials.run(trial, settings, "training contrastive models")
    found = {way: results[i * len(seeds) : (i + 1) * len(seeds)] for i, way in enumerate(WAYS)}
    losses = {way: np.array([_end(r["loss"], steps) for r in some]) for way, some in found.items()}
    lost = losses["float8"].mean() - losses["fp32"].mean()
    lost_scaled = losses["float8, layer-scale"].mean() - losses["fp32, layer-scale"].mean()
    plain, scaled = (np.mean([r["features"] for r in found[way]], 0) for way in ("fp32", "fp32, layer-scale"))
    rows = [
        (way, f"{losses[way].mean():.3f}", f"{losses[way].min():.3f} to {losses[way].max():.3f}",
         f"{np.mean([r['accuracy'] for r in some]):.1%}", f"{np.mean([r['features'][-1] for r in some]):.2f}")
        for way, some in found.items()
    ]  # fmt: skip
    fails = losses["float8"].min() > losses["fp32"].max() and lost > 2 * max(lost_scaled, 0)
    return Finding(
        name="fp8-layerscale",
        claim=CLAIM,
        source=SOURCE,
        holds=bool(fails and scaled[-1] < plain[-1]),
        verdict=f"float8 costs {lost:+.3f} of the loss without layer-scale and {lost_scaled:+.3f} with it. Features "
        f"after the last block have a mean magnitude of {plain[-1]:.2f} without and {scaled[-1]:.2f} with it, after "
        f"the first {plain[0]:.2f} and {scaled[0]:.2f}.",
        header=("training", "loss", "of seeds", "accuracy among 64", "features after the last block"),
        rows=rows,
        curves={
            "loss, first seed": {way: list(enumerate(some[0]["loss"])) for way, some in found.items()},
            "mean magnitude of features, over blocks": {
                "without layer-scale": list(enumerate(plain.tolist())), "with": list(enumerate(scaled.tolist()))
            },
        },
        settings={"seeds": list(seeds), **{k: v for k, v in asdict(settings[0]).items() if k != "seed"}},
    )  # fmt: skip


def _end(loss: list[float], steps: int) -> float:
    """Return the mean of a run's last losses, or its highest loss if the run diverged."""
    return float(np.mean(loss[-_LAST:])) if len(loss) == steps else float(np.nanmax(loss))
