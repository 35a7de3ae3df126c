"""Figure 12 and §2.4: one gradient scale per resblock, for cases in which a single loss scale is not enough.

Gradients that enter a resblock shrink from the first block to the last, and more so in deeper models. A format with few
exponent bits cannot hold the gradients of all blocks at one scale: if those of the first blocks are just below its
largest number, those of the last blocks underflow to zero. The paper observed underflow in fp16 from about a billion
parameters. The model here is small, so its format is narrower: three exponent bits for the gradients of all linear
layers in the blocks, simulated.

The paper's rules adapt scales over hundreds of thousands of updates. For these short runs, all time constants are
divided by 40.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from limner.experiments.report import Finding
from limner.experiments.sweep import Result, TrialRunner
from limner.numerics.formats import FloatFormat
from limner.training.grad_scaler import DynamicLossScaler, PerBlockGradScaler
from limner.training.hooks import Hook
from limner.training.train_state import TrainState

CLAIM = "A gradient scale for each resblock trains in a format with too few exponent bits for one loss scale"
SOURCE = "Ramesh et al. 2021, §2.4, App. D.1, Figure 12"

NARROW_FORMAT = FloatFormat(1, 3, 8, bias=-2)  # up to about 1,000: the first blocks' gradients at the initial scale
_SPEEDUP = 40
_LAST = 50  # last steps whose loss is averaged


class FastPerBlockGradScaler(PerBlockGradScaler):
    """The paper's rule, `_SPEEDUP` times faster. `history` holds log2 of the scales after each update."""

    GROWTH = PerBlockGradScaler.GROWTH**_SPEEDUP
    BACKOFF_INTERVAL = PerBlockGradScaler.BACKOFF_INTERVAL // _SPEEDUP

    def __init__(self, run: TrainState, form: FloatFormat | None = None) -> None:
        super().__init__(run, form)
        self.history: list[list[float]] = []

    def after_backward(self, run: TrainState) -> None:
        super().after_backward(run)
        self.history.append(self.scales.log2().tolist())


class FastLossScaler(DynamicLossScaler):
    """`DynamicLossScaler`, `_SPEEDUP` times faster."""

    GROWTH_INTERVAL = DynamicLossScaler.GROWTH_INTERVAL // _SPEEDUP


@dataclass(frozen=True, kw_only=True)
class GradScaleSetting:
    """Settings of a small prior. `kind` is "none", "loss" or "resblocks" (scales in the narrow format), or "fp32"."""

    kind: str
    seed: int
    steps: int
    depth: int
    batch: int = 32
    lr: float = 2e-3


def grad_scaler_hooks(kind: str, run: TrainState) -> Sequence[Hook]:
    """Return the hook that scales gradients, if any."""
    if kind == "resblocks":
        return [FastPerBlockGradScaler(run, NARROW_FORMAT)]
    return [FastLossScaler(run)] if kind == "loss" else []


def trial(setting: GradScaleSetting) -> Result:
    """Return the losses, skipped updates, and scales: of resblocks after each update, of the loss at the end."""
    from limner.experiments import tiny_prior
    from limner.numerics.precision import Fp32
    from limner.optim.optimizers import AdamWConfig
    from limner.quantization.precisions import SimulatedGradients

    scalers: list[Hook] = []

    def make_hooks(run: TrainState) -> Sequence[Hook]:
        scalers.extend(grad_scaler_hooks(setting.kind, run))
        return scalers

    trained = tiny_prior.train(
        setting.steps, model=replace(tiny_prior.MODEL, depth=setting.depth), seed=setting.seed, batch=setting.batch,
        clip_norm=1.0, hooks=make_hooks,
        optimizer=AdamWConfig(lr=setting.lr, betas=(0.9, 0.98)), precision=Fp32() if setting.kind == "fp32" else
        SimulatedGradients(gradient_format=NARROW_FORMAT), max_bad_steps=setting.steps,
    )  # fmt: skip
    return {
        "loss": trained.loss.tolist(),
        "held_out": tiny_prior.held_out_loss(trained.run.model),  # pyright: ignore[reportArgumentType]
        "skipped": trained.run.skipped,
        "scales": scalers[0].history if scalers and isinstance(scalers[0], FastPerBlockGradScaler) else [],
        "loss_scale": scalers[0].scale.log2().item() if scalers and isinstance(scalers[0], DynamicLossScaler) else None,
    }


def reproduce(trials: TrialRunner, quick: bool) -> Finding:
    """Compare a scale per resblock, a loss scale, and no scale with fp32."""
    kinds, seeds = ("fp32", "resblocks", "loss", "none"), range(1, 2 if quick else 4)
    depth, steps = (2, 15) if quick else (12, 400)
    settings = [GradScaleSetting(kind=kind, seed=seed, steps=steps, depth=depth) for kind in kinds for seed in seeds]
    results = trials.run(trial, settings, "training priors")
    by_kind = {kind: results[i * len(seeds) : (i + 1) * len(seeds)] for i, kind in enumerate(kinds)}
    held_out = {kind: np.array([r["held_out"] for r in runs]) for kind, runs in by_kind.items()}
    fp32, per_block, single = (held_out[kind].mean() for kind in ("fp32", "resblocks", "loss"))
    scales = np.array([r["scales"][-1] for r in by_kind["resblocks"]]).mean(0)
    history = np.array(by_kind["resblocks"][0]["scales"])
    charted = dict.fromkeys(np.linspace(0, len(scales) - 1, 4).round().astype(int).tolist())
    labels = {"fp32": "fp32", "resblocks": "per resblock", "loss": "loss", "none": "none"}
    rows = [
        (
            "fp32" if kind == "fp32" else str(NARROW_FORMAT),
            "-" if kind == "fp32" else labels[kind],
            f"{np.mean([np.mean(r['loss'][-_LAST:]) for r in runs]):.3f}",
            f"{held_out[kind].mean():.3f}",
            f"{held_out[kind].min():.3f} to {held_out[kind].max():.3f}",
            max(r["skipped"] for r in runs),
        )
        for kind, runs in by_kind.items()
    ]
    block_gap, single_gap = per_block - fp32, single - fp32
    return Finding(
        name="grad-scales",
        claim=CLAIM,
        source=SOURCE,
        holds=bool(block_gap < 0.25 * single_gap and held_out["resblocks"].max() < held_out["loss"].min()),
        verdict=f"Gradients in {NARROW_FORMAT} change the held-out loss by {block_gap:+.3f} with a scale per resblock "
        f"and {single_gap:+.3f} with one loss scale (fp32: {fp32:.3f}); the claim holds if the first is less than a "
        f"quarter of the second. The scales at the end span "
        f"{scales.max() - scales.min():.1f} powers of two, from 2^{scales[0]:.1f} in the first resblock to "
        f"2^{scales[-1]:.1f} in the last.",
        header=("gradients in", "scale", "training loss", "held-out loss", "of seeds", "skipped updates, max"),
        rows=rows,
        curves={
            "loss, first seed": {labels[kind]: list(enumerate(runs[0]["loss"])) for kind, runs in by_kind.items()},
            "log2 of the scales, first seed": {
                f"resblock {i + 1}": list(enumerate(history[:, i].tolist())) for i in charted
            },
            "log2 of the scales at the end, over resblocks": {"mean of seeds": list(enumerate(scales.tolist()))},
        },
        settings={"seeds": list(seeds), **{k: v for k, v in asdict(settings[0]).items() if k not in ("kind", "seed")}},
    )
