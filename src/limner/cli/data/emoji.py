"""`limner data emoji`: write the emoji of an installed font."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from limner.cli.arguments import check_writable, parse
from limner.cli.data.shared import print_counts
from limner.progress import progress
from limner.validation import Range, Validated


@dataclass(frozen=True, kw_only=True)
class WriteEmoji(Validated):
    """Write every emoji of an installed color-emoji font, with its names and a held-out split."""

    out: Positional[Path]
    """New folder for tar shards."""
    size: Annotated[int, Range(8, 1_024)] = 64
    """Side of the pictures in pixels."""
    font: Path | None = None
    """Font file; by default the system's color-emoji font."""


def main(argv: Sequence[str]) -> None:
    """write the emoji of an installed font"""
    options = parse(WriteEmoji, argv, "limner data emoji")
    check_writable(options.out, folder=True)
    from limner.tasks.emoji import all_emoji, write_emoji

    with progress("drawing emoji", len(all_emoji()), unit="emoji") as bar:
        counts = write_emoji(options.out, options.size, options.font, bar.advance)
    print_counts(options.out, counts.kept, counts.rejected)
