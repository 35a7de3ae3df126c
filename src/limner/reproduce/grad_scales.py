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

from limner.numerics.formats import FloatFormat
from limner.reproduce.report import Finding
from limner.reproduce.sweep import Result, Trials
from limner.training.grad_scaler import LossScale, ResblockScales
from limner.training.hooks import Hook
from limner.training.train_state import Run

CLAIM = "A gradient scale for each resblock trains in a format whose exponents are too few for one scale of the loss"
SOURCE = "Ramesh et al. 2021, §2.4, App. D.1, Figure 12"

FORM = FloatFormat(1, 3, 8, bias=-2)  # up to about 1,000: the first blocks' gradients at the initial scale
_FASTER = 40
_LAST = 50  # last steps whose loss is averaged


class ResblockScalesFast(ResblockScales):
    """The paper's rule, `_FASTER` times faster. `seen` holds log2 of the scales after each update."""

    GROWTH = ResblockScales.GROWTH**_FASTER
    WINDOW = ResblockScales.WINDOW // _FASTER

    def __init__(self, run: Run, form: FloatFormat | None = None) -> None:
        super().__init__(run, form)
        self.seen: list[list[float]] = []

    def after_backward(self, run: Run) -> None:
        super().after_backward(run)
        self.seen.append(self.scales.log2().tolist())


class LossScaleFast(LossScale):
    """`LossScale`, `_FASTER` times faster."""

    EVERY = LossScale.EVERY // _FASTER


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a small prior. `kind` is "none", "loss" or "resblocks" (scales in the narrow format), or "fp32"."""

    kind: str
    seed: int
    steps: int
    depth: int
    batch: int = 32
    lr: float = 2e-3


def hooks(kind: str, run: Run) -> Sequence[Hook]:
    """Return the hook that scales gradients, if any."""
    if kind == "resblocks":
        return [ResblockScalesFast(run, FORM)]
    return [LossScaleFast(run)] if kind == "loss" else []


def trial(of: Training) -> Result:
    """Return the losses, skipped updates, and scales: of resblocks after each update, of the loss at the end."""
    from limner.layers.precisions import Narrow
    from limner.numerics.precision import Fp32
    from limner.optim.optimizers import AdamWConfig
    from limner.reproduce import tiny_prior

    made: list[Hook] = []

    def make(run: Run) -> Sequence[Hook]:
        made.extend(hooks(of.kind, run))
        return made

    trained = tiny_prior.train(
        of.steps, model=replace(tiny_prior.MODEL, depth=of.depth), seed=of.seed, batch=of.batch, clip_norm=1.0,
        hooks=make,
        optimizer=AdamWConfig(lr=of.lr, betas=(0.9, 0.98)), precision=Fp32() if of.kind == "fp32" else
        Narrow(form=FORM), max_bad_steps=of.steps,
    )  # fmt: skip
    return {
        "loss": trained.loss.tolist(),
        "held_out": tiny_prior.held_out_loss(trained.run.model),  # pyright: ignore[reportArgumentType]
        "skipped": trained.run.skipped,
        "scales": made[0].seen if made and isinstance(made[0], ResblockScalesFast) else [],
        "loss_scale": made[0].scale.log2().item() if made and isinstance(made[0], LossScale) else None,
    }


def reproduce(trials: Trials, quick: bool) -> Finding:
    """Compare a scale per resblock, a loss scale, and no scale with fp32."""
    kinds, seeds = ("fp32", "resblocks", "loss", "none"), range(1, 2 if quick else 4)
    depth, steps = (2, 15) if quick else (12, 400)
    settings = [Training(kind=kind, seed=seed, steps=steps, depth=depth) for kind in kinds for seed in seeds]
    results = trials.run(trial, settings, "training priors")
    found = {kind: results[i * len(seeds) : (i + 1) * len(seeds)] for i, kind in enumerate(kinds)}
    held_out = {kind: np.array([r["held_out"] for r in some]) for kind, some in found.items()}
    best, ours, global_ = (held_out[kind].mean() for kind in ("fp32", "resblocks", "loss"))
    scales = np.array([r["scales"][-1] for r in found["resblocks"]]).mean(0)
    early = np.array(found["resblocks"][0]["scales"])
    shown = dict.fromkeys(np.linspace(0, len(scales) - 1, 4).round().astype(int).tolist())
    words = {"fp32": "fp32", "resblocks": "one for each resblock", "loss": "one for the loss", "none": "none"}
    rows = [
        (
            "fp32" if kind == "fp32" else str(FORM),
            "-" if kind == "fp32" else words[kind],
            f"{np.mean([np.mean(r['loss'][-_LAST:]) for r in some]):.3f}",
            f"{held_out[kind].mean():.3f}",
            f"{held_out[kind].min():.3f} to {held_out[kind].max():.3f}",
            max(r["skipped"] for r in some),
        )
        for kind, some in found.items()
    ]
    lost_ours, lost_global = ours - best, global_ - best
    return Finding(
        name="grad-scales",
        claim=CLAIM,
        source=SOURCE,
        holds=bool(lost_ours < 0.25 * lost_global and held_out["resblocks"].max() < held_out["loss"].min()),
        verdict=f"Gradients in {FORM} cost {lost_ours:+.3f} of fresh scenes' loss with a scale for each resblock and "
        f"{lost_global:+.3f} with one for the loss (fp32: {best:.3f}); to hold, the first had to be less than a "
        f"quarter of the second. The scales at the end span "
        f"{scales.max() - scales.min():.1f} powers of two, from 2^{scales[0]:.1f} in the first resblock to "
        f"2^{scales[-1]:.1f} in the last.",
        header=("gradients in", "scale", "training loss", "loss on fresh scenes", "of seeds", "updates skipped, most"),
        rows=rows,
        curves={
            "loss, first seed": {words[kind]: list(enumerate(some[0]["loss"])) for kind, some in found.items()},
            "log2 of the scales, first seed": {
                f"resblock {i + 1}": list(enumerate(early[:, i].tolist())) for i in shown
            },
            "log2 of the scales at the end, over resblocks": {"mean of seeds": list(enumerate(scales.tolist()))},
        },
        settings={"seeds": list(seeds), **{k: v for k, v in asdict(settings[0]).items() if k not in ("kind", "seed")}},
    )
