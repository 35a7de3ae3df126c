"""`limner data scenes`: write the built-in synthetic world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional

from limner.cli.arguments import parse, place
from limner.cli.data.shared import tell
from limner.progress import progress
from limner.validation import SEEDS, Checked, OutOfRange, Range


@dataclass(frozen=True, kw_only=True)
class WriteScenes(Checked):
    """Write the synthetic world: pictures, several phrasings each, ground truth, and a split that holds
    out combinations of attributes. The same command writes the same bytes.
    """

    out: Positional[Path]
    """A new folder, for tar shards."""
    count: Annotated[int, Range(1, 10**9)] = 20_000
    """Pictures."""
    seed: Annotated[int, SEEDS] = 0
    """Another seed gives other scenes."""
    size: Annotated[int, Range(24, 1_536)] = 48
    """Side of the pictures in pixels, a multiple of 24."""
    kind: Literal["described", "crowded"] = "described"
    """Scenes that captions describe, or crowded ones to train a dVAE on."""
    held_out: Annotated[float, Range(0, 1)] = 0.05
    """Share of samples with a held-out combination."""
    pairs: Annotated[float, Range(0, 1)] = 0.1
    """Share of top-and-bottom pairs ("the exact same scene on the top as a sketch at the bottom")."""
    things: Annotated[tuple[float, float, float, float], Range(0)] = (3, 5, 1, 1)
    """How often described scenes have one, two, three and four things, relative to each other."""
    in_order: Annotated[float, Range(0, 1)] = 0.0
    """How often captions of two things are made to say the upper or left one first; the others say either first. A
    model learns "above" and "below" sooner if one order is rarer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size % 24:
            raise OutOfRange("size", f"must be a multiple of 24, not {self.size}")
        if not sum(self.things):
            raise OutOfRange("things", "must have one share above 0 at least")


def main(argv: Sequence[str]) -> None:
    """write the built-in synthetic world"""
    options = parse(WriteScenes, argv, "limner data scenes")
    place(options.out, folder=True)
    from limner.tasks.build_scenes import write_scenes

    with progress("drawing scenes", options.count, unit="scene") as bar:
        summary = write_scenes(
            options.out, options.count, options.seed, size=options.size, kind=options.kind,
            held_out=options.held_out, pairs=options.pairs, things=options.things,
            in_order=options.in_order, progress=bar.advance,
        )  # fmt: skip
    tell(options.out, summary["kept"], summary["rejected"], summary["splits"])
