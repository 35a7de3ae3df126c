"""The papers' findings, and one that sets a later method beside theirs, each a file here and a command: `limner
reproduce NAME`.

A file has the paper's claim and its source, trials that a machine with two cores runs within twenty minutes, and what
it says of their results: a `Finding`, with a table, curves, and whether the claim holds at this scale.
"""

from importlib import import_module
from typing import Any, Protocol, cast

from limner.reproduce.report import Finding
from limner.reproduce.sweep import Trials

#: In the order of the papers' sections.
NAMES = (
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
    """A file of this room."""

    CLAIM: str
    SOURCE: str

    def reproduce(self, trials: Trials, quick: bool) -> Finding:
        """Run the trials, or with `quick` a few short ones that only show that it works."""
        ...


def load(name: str) -> Reproduction:
    """The file of one of `NAMES`."""
    module: Any = import_module(f"{__name__}.{name.replace('-', '_')}")
    return cast(Reproduction, module)
