"""`limner evaluate composition | pairs | reconstruction | zero-shot | emoji | icons | grid`: measure a trained model.

The defaults are those of published results: many captions, and seeds from 1,000 on, which are reserved for testing. To
choose between models or settings, give a seed below 1,000.
"""

from __future__ import annotations

from collections.abc import Sequence

from limner.cli import run_subcommand
from limner.cli.evaluate import composition, emoji, grid, icons, pairs, reconstruction, zero_shot


def main(argv: Sequence[str]) -> None:
    """Run a subcommand of `limner evaluate`."""
    commands = {
        "composition": composition.main, "pairs": pairs.main, "reconstruction": reconstruction.main,
        "zero-shot": zero_shot.main, "emoji": emoji.main, "icons": icons.main, "grid": grid.main,
    }  # fmt: skip
    run_subcommand("limner evaluate", commands, argv)
