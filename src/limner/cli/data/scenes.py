"""`limner data scenes`: write the built-in synthetic scenes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional

from limner.cli.arguments import check_writable, parse
from limner.cli.data.shared import print_counts
from limner.progress import progress
from limner.validation import SEEDS, InvalidSetting, Range, Validated


@dataclass(frozen=True, kw_only=True)
class WriteScenes(Validated):
    """Write synthetic scenes: pictures, several captions each, ground truth, and a split that holds
    out combinations of attributes. The same command writes the same bytes.
    """

    out: Positional[Path]
    """New folder for tar shards."""
    count: Annotated[int, Range(1, 10**9)] = 20_000
    """Number of pictures."""
    seed: Annotated[int, SEEDS] = 0
    """Seed of the scenes."""
    size: Annotated[int, Range(24, 1_536)] = 48
    """Side of the pictures in pixels, a multiple of 24."""
    kind: Literal["described", "crowded"] = "described"
    """Scenes with captions that describe them, or crowded scenes for training a dVAE."""
    held_out: Annotated[float, Range(0, 1)] = 0.05
    """Share of samples with a held-out combination."""
    pairs: Annotated[float, Range(0, 1)] = 0.1
    """Share of top-and-bottom pairs ("the exact same scene on the top as a sketch at the bottom")."""
    things: Annotated[tuple[float, float, float, float], Range(0)] = (3, 5, 1, 1)
    """Relative frequencies of described scenes with one, two, three and four objects."""
    in_order: Annotated[float, Range(0, 1)] = 0.0
    """Probability that a caption of two objects must name the upper or left one first; otherwise the order is random. A
    model learns "above" and "below" sooner if one order is rarer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size % 24:
            raise InvalidSetting("size", f"must be a multiple of 24, not {self.size}")
        if not sum(self.things):
            raise InvalidSetting("things", "must have at least one frequency above 0")


def main(argv: Sequence[str]) -> None:
    """write the built-in synthetic scenes"""
    options = parse(WriteScenes, argv, "limner data scenes")
    check_writable(options.out, folder=True)
    from limner.tasks.build_scenes import write_scenes

    with progress("drawing scenes", options.count, unit="scene") as bar:
        summary = write_scenes(
            options.out, options.count, options.seed, size=options.size, kind=options.kind,
            held_out=options.held_out, pairs=options.pairs, count_weights=options.things,
            in_order=options.in_order, progress=bar.advance,
        )  # fmt: skip
    print_counts(options.out, summary["kept"], summary["rejected"], summary["splits"])
