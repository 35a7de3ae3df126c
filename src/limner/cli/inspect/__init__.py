"""`limner inspect precision | spikes | underflow`: a run's kernels, its spikes, what formats lose of its gradients."""

from __future__ import annotations

from collections.abc import Sequence

from limner.cli import dispatch
from limner.cli.inspect import precision, spikes, underflow


def main(argv: Sequence[str]) -> None:
    """Run one of the commands."""
    dispatch("limner inspect", {"precision": precision.main, "spikes": spikes.main, "underflow": underflow.main}, argv)
