"""`limner data scenes | icons | glyphs | emoji | prepare | show`: make, prepare or look at training data."""

from __future__ import annotations

from collections.abc import Sequence

from limner.cli import run_subcommand
from limner.cli.data import emoji, glyphs, icons, prepare, scenes, show


def main(argv: Sequence[str]) -> None:
    """Run a subcommand of `limner data`."""
    commands = {
        "scenes": scenes.main, "icons": icons.main, "glyphs": glyphs.main, "emoji": emoji.main,
        "prepare": prepare.main, "show": show.main,
    }  # fmt: skip
    run_subcommand("limner data", commands, argv)
