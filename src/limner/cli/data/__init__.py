"""`limner data scenes | icons | emoji | prepare | show`: make, prepare or look at training data."""

from __future__ import annotations

from collections.abc import Sequence

from limner.cli import dispatch
from limner.cli.data import emoji, icons, prepare, scenes, show


def main(argv: Sequence[str]) -> None:
    """Run a subcommand of `limner data`."""
    kinds = {
        "scenes": scenes.main, "icons": icons.main, "emoji": emoji.main, "prepare": prepare.main, "show": show.main,
    }  # fmt: skip
    dispatch("limner data", kinds, argv)
