"""`limner data prepare`: filter, shrink and pack your own data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from limner.cli.arguments import check_writable, parse
from limner.cli.data.shared import print_counts
from limner.data.filters import Filters
from limner.progress import progress
from limner.validation import Range, Validated


@dataclass(frozen=True, kw_only=True)
class Prepare(Validated):
    """Write the usable samples of a source to tar shards; count defects and rejections of filters.

    A source is a folder of pictures with .txt captions, a JSONL, CSV, Parquet or Arrow file with a caption
    column and image paths or bytes, a Hugging Face data set (cloned or saved to disk), or img2dataset's
    tar shards, also as a glob. Filters reject captions that are short, boilerplate or not English, and, as in the
    paper (appendix C), pictures with an aspect ratio outside [1/2, 2].
    """

    source: Positional[str]
    """Folder, file or glob (in quotes)."""
    out: Positional[Path]
    """New folder for tar shards."""
    size: Annotated[int | None, Range(1, 4_096)] = None
    """Shrink pictures to this shorter side in pixels; smaller pictures keep their size."""
    held_out: Annotated[float, Range(0, lt=1)] = 0.02
    """Share of samples held out of training for evaluation; samples that name a split keep it."""
    caption: Annotated[str | None, arg(metavar="COLUMN")] = None
    """Caption column of a table; by default recognized by its name."""
    image: Annotated[str | None, arg(metavar="COLUMN")] = None
    """Image column of a table; by default recognized by its name."""
    allow_outside: bool = False
    """Allow a table to name files outside its folder."""
    filters: Annotated[Filters, arg(name="")] = field(default_factory=Filters)


def main(argv: Sequence[str]) -> None:
    """filter, shrink and pack your own data"""
    options = parse(Prepare, argv, "limner data prepare")
    check_writable(options.out, folder=True)
    from limner.data.open_source import open_source
    from limner.data.prepare import prepare

    source = open_source(
        options.source, caption=options.caption, image=options.image, allow_outside=options.allow_outside
    )
    with progress("preparing", len(source), unit="sample") as bar:
        counts = prepare(
            source, options.out, filters=options.filters, size=options.size, held_out=options.held_out,
            progress=bar.advance,
        )  # fmt: skip
    print_counts(options.out, counts.kept, counts.rejected, counts.splits)
