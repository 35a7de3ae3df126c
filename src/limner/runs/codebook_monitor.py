"""A warning for a dVAE whose codebook collapses."""

from __future__ import annotations

import warnings
from typing import Any

from limner.training.hooks import Hook
from limner.training.train_state import TrainState

_MIN_USED_SHARE, _FIRST_STEP, _CONSECUTIVE_REPORTS = 0.1, 500, 10


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
