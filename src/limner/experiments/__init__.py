"""Small-scale reproductions of the papers' findings, and of one later method: `limner reproduce NAME`.

Each module states the paper's claim and its source, and runs trials that take a machine with two cores at most twenty
minutes. It returns a `Finding`: a table, curves, and whether the claim holds at this scale.
"""

from importlib import import_module
from typing import Any, Protocol, cast

from limner.experiments.report import Finding
from limner.experiments.sweep import TrialRunner

#: In the order of the papers' sections.
EXPERIMENTS = (
    "grad-scales",
    "compression-rank",
    "fixed-q",
    "sixteen-bit-moments",
    "bandwidth",
    "householder",
    "dion",
    "switchback-accuracy",
    "fp8-layerscale",
    "switchback-speed",
    "quantization-variance",
    "loss-spikes",
    "rms-predicts",
    "stable-adamw",
)


class Reproduction(Protocol):
    """A module of this package."""

    CLAIM: str
    SOURCE: str

    def reproduce(self, trials: TrialRunner, quick: bool) -> Finding:
        """Run the trials, or with `quick` a few short ones as a smoke test."""
        ...


def load(name: str) -> Reproduction:
    """Import the module of one of `EXPERIMENTS`."""
    module: Any = import_module(f"{__name__}.{name.replace('-', '_')}")
    return cast(Reproduction, module)
