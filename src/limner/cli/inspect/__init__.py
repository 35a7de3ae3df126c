"""`limner inspect precision | spikes | underflow`: a run's kernels, loss spikes, and gradient underflow by format."""

from __future__ import annotations

from collections.abc import Sequence

from limner.cli import dispatch
from limner.cli.inspect import precision, spikes, underflow


def main(argv: Sequence[str]) -> None:
    """Run a subcommand of `limner inspect`."""
    dispatch("limner inspect", {"precision": precision.main, "spikes": spikes.main, "underflow": underflow.main}, argv)
