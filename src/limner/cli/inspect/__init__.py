"""`limner inspect precision | spikes | underflow`: a run's kernels, loss spikes, and gradient underflow by format."""

from __future__ import annotations

from collections.abc import Sequence

from limner.cli import run_subcommand
from limner.cli.inspect import precision, spikes, underflow


def main(argv: Sequence[str]) -> None:
    """Run a subcommand of `limner inspect`."""
    commands = {"precision": precision.main, "spikes": spikes.main, "underflow": underflow.main}
    run_subcommand("limner inspect", commands, argv)
