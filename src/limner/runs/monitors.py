"""Monitors of training: stability (Wortsman et al. 2023, §2.3 and §3.4), and the collapse of a dVAE's codebook.

RMS_t of matrices is logged in each step, with a warning before the loss spikes, and feature magnitudes every
`log_every` steps.

AdamW divides gradients g_t by the root of u_t, a running mean of their squares. `RMS_t = sqrt(mean(g_t^2 / u_t))` of a
tensor is about 1 if u_t is up to date, and rises far above 1 after a sudden growth of gradients. The update is then too
large, and one to eight steps later the loss spikes.

    RUN/STAGE/stability.jsonl: {"step": 120, "loss": 2.1, "rms": {"patches.weight": 1.02, ...},
                                "features": {"image_blocks.0": 0.81, ...}}

"features" is the mean magnitude of each block's output, E[abs(x_k)]. Low-precision formats fail first in models where
it grows with depth (Figure 2).
"""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from limner.blocks import named_blocks
from limner.metrics.spikes import MERGE_STEPS, RMS_SPIKE
from limner.optim.adam_base import rms
from limner.training.hooks import Hook
from limner.training.metrics_log import MetricsLog
from limner.training.train_state import TrainState

MAX_NAMES = 3  # most tensors named in a warning
_MIN_USED_SHARE, _FIRST_STEP, _CONSECUTIVE_REPORTS = 0.1, 500, 10  # of `CollapseWarning`


class RMSMonitor(Hook):
    """Writes `out/stability.jsonl`, a line for each step, with RMS_t of all matrices updated by a variant of Adam.

    g_t is the clipped gradient, as in the optimizer; skipped updates are logged without RMS_t. Warns after the warm-up
    if RMS_t of a matrix reaches `RMS_SPIKE` in two consecutive steps, and again for the same matrix only after
    `WARNING_INTERVAL` steps.
    """

    WARNING_INTERVAL = 1_000
    saved = ("warned", "rms")

    def __init__(self, out: Path) -> None:
        self.path = out / "stability.jsonl"
        self.rms: dict[str, float] = {}
        self.previous_rms: dict[str, float] = {}  # `rms` of the previous step
        self.log: MetricsLog | None = None
        self.warned: dict[str, int] = {}
        self.features: dict[str, Tensor] | None = None  # of this step; None unless `log_every` divides it
        self.handles: list[RemovableHandle] = []

    def before_step(self, run: TrainState) -> None:
        if not self.handles:
            blocks = named_blocks(run.model).items()
            self.handles = [block.register_forward_hook(partial(self._record, name)) for name, block in blocks]
        self.previous_rms, self.rms = self.rms, {}
        self.features = {} if (run.step + 1) % run.config.log_every == 0 else None

    def _record(self, name: str, block: nn.Module, inputs: Any, x: Tensor) -> None:
        if self.features is not None and x.requires_grad:  # excludes evaluation
            self.features[name] = x.detach().abs().mean()

    def before_update(self, run: TrainState) -> None:
        names = {id(p): name for name, p in run.model.named_parameters()}
        tensors = {names[id(p)]: value for p, value in rms(run.optimizers) if p.ndim > 1}
        values = torch.stack(list(tensors.values())).tolist() if tensors else []
        self.rms |= zip(tensors, values, strict=True)

    def after_update(self, run: TrainState) -> None:
        self.rms = run.parallel.merge(self.rms)
        row = {"step": run.step, "loss": run.loss, "rms": {k: round(v, 2) for k, v in self.rms.items()}}
        if self.features is not None:
            values = torch.stack(list(self.features.values())).tolist() if self.features else []
            features = {name: float(f"{x:.3g}") for name, x in zip(self.features, values, strict=True)}
            row |= {"features": features} if (features := run.parallel.merge(features)) else {}
            self.features = None
        if run.parallel.is_main:  # the first line removes those of steps that a resumed run repeats
            self.log = self.log or MetricsLog(self.path, run.step - 1)
            self.log.write(row)
        if run.step <= max(run.config.warmup_steps, MERGE_STEPS):
            return
        high = {
            name: value
            for name, value in self.rms.items()
            if min(value, self.previous_rms.get(name, 0.0)) >= RMS_SPIKE
            and run.step - self.warned.get(name, -self.WARNING_INTERVAL) >= self.WARNING_INTERVAL
        }
        if high:
            self.warned |= dict.fromkeys(high, run.step)
            highest = sorted(high, key=lambda name: -high[name])[:MAX_NAMES]
            names = ", ".join(f"{name} ({high[name]:.1f})" for name in highest)
            warnings.warn(
                f"step {run.step}: RMS_t of {names} is far above 1, so the loss may spike within eight steps: use "
                "StableAdamW, or a lower second beta",
                stacklevel=2,
            )

    def close(self) -> None:
        if self.log:
            self.log.close()
        for handle in self.handles:
            handle.remove()


class CollapseWarning(Hook):
    """Warn once per run if the codebook has collapsed, with remedies.

    Single batches may use few codes. The warning therefore needs `_CONSECUTIVE_REPORTS` reports from `_FIRST_STEP` on
    with less than `_MIN_USED_SHARE` of the vocabulary in use. Checkpoints hold their count and whether the run warned.
    """

    saved = ("low_reports", "warned")

    def __init__(self, vocab: int) -> None:
        self.vocab, self.low_reports, self.warned = vocab, 0, False

    def before_log(self, run: TrainState, row: dict[str, Any]) -> None:
        codes = row.get("codes", self.vocab)
        low = run.step >= _FIRST_STEP and codes < _MIN_USED_SHARE * self.vocab
        self.low_reports = self.low_reports + 1 if low else 0
        if self.low_reports >= _CONSECUTIVE_REPORTS and not self.warned:
            self.warned = True
            warnings.warn(
                f"the codebook has collapsed: {codes:.0f} of {self.vocab} codes are in use after {run.step} steps; "
                "for small or flat pictures train with objective BalancedELB (or raise its usage_kl_weight), raise "
                "min_log_b, or lower the learning rate",
                stacklevel=2,
            )
