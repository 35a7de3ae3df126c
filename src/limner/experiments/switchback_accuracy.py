"""§2.2 and Figure 1: int8 SwitchBack matches the accuracy of 16-bit training; LLM.int8(), which also computes the
weight gradient in int8, does not.

The weight gradient sums over all positions of a batch, so it accumulates the most rounding error (Appendix D): the
difference grows with the batch. Small contrastive models train with products in bf16, in int8 by SwitchBack, and in
int8 by LLM.int8(). The gradient error of both is also measured directly: int8 against fp32 gradients of one batch, on
models trained in bf16.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import numpy as np
from torch import Tensor, nn

from limner.experiments import tiny_clip
from limner.experiments.report import Finding
from limner.experiments.sweep import Result, TrialRunner
from limner.experiments.tiny_train import scenes
from limner.numerics.precision import Bf16, Fp32
from limner.objectives.hard_negatives import HardNegativeLoss
from limner.optim.optimizers import AdamWConfig
from limner.quantization.convert import convert
from limner.quantization.precisions import LLMInt8, SwitchBack, in_blocks

CLAIM = "Models trained with SwitchBack in int8 are as accurate as with bf16; with LLM.int8() they are less accurate"
SOURCE = "Wortsman et al. 2023, §2.3, Figure 1"

KINDS: Mapping[str, Fp32] = {"bf16": Bf16(), "SwitchBack": SwitchBack(), "LLM.int8()": LLMInt8()}
_LAST = 50  # last steps whose loss is averaged


@dataclass(frozen=True, kw_only=True)
class SwitchBackSetting:
    """Settings of a small contrastive model. `batches` are batch sizes for comparing gradients after training."""

    kind: str
    seed: int
    steps: int
    batch: int = 128
    lr: float = 2e-3
    batches: tuple[int, ...] = ()


def trial(setting: SwitchBackSetting) -> Result:
    """Return the losses, accuracy on new scenes, and the errors of int8 gradients."""
    model = replace(tiny_clip.MODEL, patch_dropout=0.0)  # use all positions
    trained = tiny_clip.train(
        setting.steps, model=model, seed=setting.seed, batch=setting.batch, precision=KINDS[setting.kind],
        optimizer=AdamWConfig(lr=setting.lr, betas=(0.9, 0.98)),
    )  # fmt: skip
    result = {"loss": trained.loss.tolist(), "accuracy": tiny_clip.accuracy(trained.run.model)}  # pyright: ignore[reportArgumentType]
    return result | {"errors": [gradient_errors(trained.run.model, n) for n in setting.batches]}


def gradient_errors(model: nn.Module, batch: int) -> dict[str, float]:
    """Return the relative error (L2 norm) of int8 weight gradients against fp32, the maximum over block matrices."""
    exact = gradients(model, batch)
    errors = {}
    for name, precision in KINDS.items():
        if isinstance(precision, SwitchBack):
            rounded = gradients(convert(copy.deepcopy(model), precision.layer.from_linear, in_blocks), batch)
            errors[name] = max(((rounded[key] - exact[key]).norm() / exact[key].norm()).item() for key in exact)
    return errors


def gradients(model: nn.Module, batch: int) -> dict[str, Tensor]:
    """Return the gradients of the block matrices on the first `batch` scenes."""
    pictures, tokens = scenes()
    model.zero_grad()
    loss, _ = HardNegativeLoss()(model, {"pixels": pictures[:batch], "text": tokens[:batch]}, 0, None)  # pyright: ignore[reportArgumentType]
    loss.backward()
    return {
        name: p.grad.clone()
        for name, p in model.named_parameters()
        if "blocks." in name and p.grad is not None and p.ndim > 1
    }


def reproduce(trials: TrialRunner, quick: bool) -> Finding:
    """Compare the accuracy of SwitchBack and LLM.int8() with bf16."""
    seeds, steps, batch, sizes = (range(1), 8, 32, (16, 32)) if quick else (range(4), 400, 128, (64, 256, 1_024))
    settings = [
        SwitchBackSetting(kind=kind, seed=seed, steps=steps, batch=batch, batches=sizes if kind == "bf16" else ())
        for kind in KINDS
        for seed in seeds
    ]
    results = trials.run(trial, settings, "training contrastive models")
    by_kind = {kind: results[i * len(seeds) : (i + 1) * len(seeds)] for i, kind in enumerate(KINDS)}
    accuracy = {kind: np.array([r["accuracy"] for r in runs]) for kind, runs in by_kind.items()}
    switchback, llm_int8 = (accuracy[kind] - accuracy["bf16"] for kind in ("SwitchBack", "LLM.int8()"))
    noise = 2 * accuracy["bf16"].std(ddof=1 if len(seeds) > 1 else 0) / len(seeds) ** 0.5
    equal, behind = abs(switchback.mean()) <= noise, llm_int8.mean() < switchback.mean() - noise
    errors = {
        kind: [float(np.mean([r["errors"][i][kind] for r in by_kind["bf16"]])) for i in range(len(sizes))]
        for kind in ("SwitchBack", "LLM.int8()")
    }
    rows = [
        (kind, f"{np.mean([np.mean(r['loss'][-_LAST:]) for r in runs]):.3f}", f"{accuracy[kind].mean():.1%}",
         f"{accuracy[kind].min():.1%} to {accuracy[kind].max():.1%}",
         *(f"{errors[kind][i]:.1%}" if kind in errors else "-" for i in range(len(sizes))))
        for kind, runs in by_kind.items()
    ]  # fmt: skip
    return Finding(
        name="switchback-accuracy",
        claim=CLAIM,
        source=SOURCE,
        holds=bool(equal and behind),
        verdict=f"The accuracy differs from bf16 by {100 * switchback.mean():+.1f} points with SwitchBack and by "
        f"{100 * llm_int8.mean():+.1f} with LLM.int8(); two standard errors over seeds are {100 * noise:.1f}. "
        f"SwitchBack {'matches' if equal else 'does not match'} bf16, LLM.int8() is {'' if behind else 'not '}less "
        f"accurate. The worst matrix's gradient has a relative error of {errors['LLM.int8()'][0]:.0%} with LLM.int8() "
        f"and {errors['SwitchBack'][0]:.0%} with SwitchBack for {sizes[0]} samples, {errors['LLM.int8()'][-1]:.0%} and "
        f"{errors['SwitchBack'][-1]:.0%} for {sizes[-1]:,}.",
        header=(
            "products",
            "training loss",
            "accuracy among 64",
            "of seeds",
            *(f"gradient error, {n:,}" for n in sizes),
        ),
        rows=rows,
        curves={
            "loss, first seed": {kind: list(enumerate(runs[0]["loss"])) for kind, runs in by_kind.items()},
            "relative error of the worst gradient, over log2 of the batch": {
                kind: list(zip(np.log2(sizes).tolist(), values, strict=True)) for kind, values in errors.items()
            },
        },
        settings={"seeds": list(seeds), **{k: v for k, v in asdict(settings[0]).items() if k not in ("kind", "seed")}},
    )
