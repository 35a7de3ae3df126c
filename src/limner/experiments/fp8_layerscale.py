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

from limner.experiments import tiny_clip
from limner.experiments.report import Finding
from limner.experiments.sweep import Result, TrialRunner
from limner.experiments.tiny_train import scenes
from limner.models.contrastive import CLIP
from limner.numerics.precision import Fp32
from limner.optim.optimizers import AdamWConfig
from limner.quantization.precisions import Fp8TensorWise

CLAIM = "Tensor-wise float8 diverges or falls behind where layer-scale from zero trains, since features stay small"
SOURCE = "Wortsman et al. 2023, §2.3, Figure 2"

_LAST = 50  # last steps whose loss is averaged
KINDS = {
    "fp32": {},
    "float8": {"fp8": True},
    "float8, clipped": {"fp8": True, "clip": 1.0},
    "float8, q and k normalized": {"fp8": True, "qk_norm": True},
    "fp32, layer-scale": {"layer_scale": True},
    "float8, layer-scale": {"fp8": True, "layer_scale": True},
}


@dataclass(frozen=True, kw_only=True)
class Fp8Setting:
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


def trial(setting: Fp8Setting) -> Result:
    """Return the losses, accuracy on new scenes, and each block's mean feature magnitude."""
    config = replace(tiny_clip.MODEL, depth=setting.depth, qk_norm=setting.qk_norm, layer_scale=setting.layer_scale)
    trained = tiny_clip.train(
        setting.steps, model=config, seed=setting.seed, batch=setting.batch, clip_norm=setting.clip,
        optimizer=AdamWConfig(lr=setting.lr, betas=(0.9, 0.98)), precision=Fp8TensorWise() if setting.fp8 else Fp32(),
    )  # fmt: skip
    model = trained.run.model
    assert isinstance(model, CLIP)
    return {"loss": trained.loss.tolist(), "accuracy": tiny_clip.accuracy(model), "features": feature_magnitudes(model)}


@torch.no_grad()
def feature_magnitudes(model: CLIP) -> list[float]:
    """Return the mean magnitude of each image block's output (Figure 2, right)."""
    magnitudes: list[float] = []
    handles = [
        block.register_forward_hook(lambda _, args, x: magnitudes.append(x.abs().mean().item()))
        for block in model.image_blocks
    ]
    model.eval()
    model.encode_image(scenes()[0][:256])
    model.train()
    for handle in handles:
        handle.remove()
    return magnitudes


def reproduce(trials: TrialRunner, quick: bool) -> Finding:
    """Compare float8 and fp32, each with and without layer-scale."""
    seeds, steps, depth = (range(1), 8, 2) if quick else (range(2), 400, 8)
    settings = [Fp8Setting(seed=seed, steps=steps, depth=depth, **flags) for flags in KINDS.values() for seed in seeds]
    results = trials.run(trial, settings, "training contrastive models")
    by_kind = {kind: results[i * len(seeds) : (i + 1) * len(seeds)] for i, kind in enumerate(KINDS)}
    losses = {kind: np.array([_final_loss(r["loss"], steps) for r in runs]) for kind, runs in by_kind.items()}
    gap = losses["float8"].mean() - losses["fp32"].mean()
    scaled_gap = losses["float8, layer-scale"].mean() - losses["fp32, layer-scale"].mean()
    plain, scaled = (np.mean([r["features"] for r in by_kind[kind]], 0) for kind in ("fp32", "fp32, layer-scale"))
    rows = [
        (kind, f"{losses[kind].mean():.3f}", f"{losses[kind].min():.3f} to {losses[kind].max():.3f}",
         f"{np.mean([r['accuracy'] for r in runs]):.1%}", f"{np.mean([r['features'][-1] for r in runs]):.2f}")
        for kind, runs in by_kind.items()
    ]  # fmt: skip
    float8_fails = losses["float8"].min() > losses["fp32"].max() and gap > 2 * max(scaled_gap, 0)
    return Finding(
        name="fp8-layerscale",
        claim=CLAIM,
        source=SOURCE,
        holds=bool(float8_fails and scaled[-1] < plain[-1]),
        verdict=f"float8 changes the loss by {gap:+.3f} without layer-scale and {scaled_gap:+.3f} with it. Features "
        f"after the last block have a mean magnitude of {plain[-1]:.2f} without and {scaled[-1]:.2f} with it, after "
        f"the first {plain[0]:.2f} and {scaled[0]:.2f}.",
        header=("training", "loss", "of seeds", "accuracy among 64", "features after the last block"),
        rows=rows,
        curves={
            "loss, first seed": {kind: list(enumerate(runs[0]["loss"])) for kind, runs in by_kind.items()},
            "mean magnitude of features, over blocks": {
                "without layer-scale": list(enumerate(plain.tolist())), "with": list(enumerate(scaled.tolist()))
            },
        },
        settings={"seeds": list(seeds), **{k: v for k, v in asdict(settings[0]).items() if k != "seed"}},
    )  # fmt: skip


def _final_loss(loss: list[float], steps: int) -> float:
    """Return the mean of a run's last losses, or its highest loss if the run diverged."""
    return float(np.mean(loss[-_LAST:])) if len(loss) == steps else float(np.nanmax(loss))
