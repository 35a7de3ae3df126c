"""The alarm for a dVAE whose codebook collapses."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from limner.training.hooks import Hook
from limner.training.run import Run


class CollapseWarning(Hook):
    """Says aloud, once a run, that the codebook has collapsed, and what to try.

    A batch may use few codes now and then: so several reports in a row must, after `after` steps, say less than
    `share` of the vocabulary. How many have, and whether it was said, a run that goes on knows.
    """

    def __init__(self, vocab: int, share: float = 0.1, after: int = 500, reports: int = 10) -> None:
        self.vocab, self.share, self.after, self.reports = vocab, share, after, reports
        self.few, self.said = 0, False

    def on_report(self, run: Run, row: dict[str, Any]) -> None:
        codes = row.get("codes", self.vocab)
        self.few = self.few + 1 if run.step >= self.after and codes < self.share * self.vocab else 0
        if self.few >= self.reports and not self.said:
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
