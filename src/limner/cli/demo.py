"""`limner demo`: from nothing to pictures and a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from limner.cli.arguments import parse, place
from limner.errors import printable
from limner.ranges import SEEDS, Checked, Range


@dataclass(frozen=True, kw_only=True)
class Options(Checked):
    """Train a prior and a contrastive model on the built-in scenes, draw held-out captions, write a report.

    It plans nine minutes of training, on a slow machine of fewer steps. Ctrl-C stops it; the same command goes on.
    """

    out: Path = Path("limner-demo")
    """Folder for data, models and report."""
    from_scratch: bool = False
    """Train the dVAE as well instead of taking the bundled one; it says beforehand how long that takes."""
    scenes: Annotated[int, Range(1, 10**8)] = 12_000
    """Scenes to train on."""
    captions: Annotated[int, Range(1, 10**4)] = 8
    """Held-out captions to show."""
    candidates: Annotated[int, Range(1, 2**16)] = 32
    """Drawings of each caption to choose from."""
    evaluated: Annotated[int, Range(1, 10**6)] = 64
    """Held-out captions that the score is taken over, those shown among them."""
    seed: Annotated[int, SEEDS] = 1_000
    """Of the captions and drawings."""


def main(argv: Sequence[str]) -> None:
    options = parse(Options, argv, "limner demo")
    place(options.out, folder=True)
    from limner.runs.demo import Demo, run

    result = run(Demo(**vars(options)))
    print(result.table())
    out = Path(printable(options.out))
    print(f"report:        {out / 'report.html'}")
    print(f"contact sheet: {out / 'contact.png'}")
    print(f'draw more:     limner draw "a large green cross on a pink background" --model {out / "run"}')
