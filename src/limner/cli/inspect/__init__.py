"""`limner inspect precision | spikes | underflow`: a run's kernels, loss spikes, and gradient underflow by format."""

from __future__ import annotations

from collections.abc import Sequence

from limner.cli import run_subcommand
from limner.cli.inspect import underflow
from limner.cli.inspect.records import precision, spikes


def main(argv: Sequence[str]) -> None:
    """Run a subcommand of `limner inspect`."""
    commands = {"precision": precision, "spikes": spikes, "underflow": underflow.main}
    run_subcommand("limner inspect", commands, argv)
