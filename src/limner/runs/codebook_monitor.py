"""A warning for a dVAE whose codebook collapses."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from limner.training.hooks import Hook
from limner.training.train_state import Run

_SHARE, _AFTER, _REPORTS = 0.1, 500, 10  # of the vocabulary, steps, consecutive reports


class CollapseWarning(Hook):
    """Warn once per run if the codebook has collapsed, with remedies.

    Single batches may use few codes. The warning therefore needs `_REPORTS` consecutive reports, after `_AFTER` steps,
    with less than `_SHARE` of the vocabulary in use. Checkpoints hold the count and whether the run has warned.
    """

    def __init__(self, vocab: int) -> None:
        self.vocab, self.few, self.said = vocab, 0, False

    def on_report(self, run: Run, row: dict[str, Any]) -> None:
        codes = row.get("codes", self.vocab)
        self.few = self.few + 1 if run.step >= _AFTER and codes < _SHARE * self.vocab else 0
        if self.few >= _REPORTS and not self.said:
            self.said = True
            warnings.warn(
                f"the codebook has collapsed: {codes:.0f} of {self.vocab} codes are in use after {run.step} steps; "
                "for small or flat pictures train with objective BalancedELB (or raise its balance), raise "
                "log_b_floor, or lower the learning rate",
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        return {"few": self.few, "said": self.said}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.few, self.said = int(state["few"]), bool(state["said"])
