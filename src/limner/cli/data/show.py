"""`limner data show`: count samples and show some of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from limner.cli.arguments import check_writable_png, parse
from limner.cli.data.shared import print_counts
from limner.errors import escape_control
from limner.progress import progress
from limner.validation import Range, Validated


@dataclass(frozen=True, kw_only=True)
class Show(Validated):
    """Count the samples of a source by split, and unusable samples by reason; show some captions."""

    source: Positional[str]
    """Folder, file or glob (in quotes)."""
    captions: Annotated[int, Range(0, 1_000)] = 8
    """Number of captions to print."""
    output: Annotated[Path | None, arg(aliases=("-o",))] = None
    """Write the samples of these captions as a contact sheet (PNG)."""


def main(argv: Sequence[str]) -> None:
    """count samples and show some of them"""
    options = parse(Show, argv, "limner data show")
    if options.output:
        check_writable_png(options.output)
    from PIL import Image

    from limner.data.image_decode import decoded
    from limner.data.open_source import open_source
    from limner.data.sample import Rejected
    from limner.evaluation.report import SheetRow, contact_sheet, save_png

    source = open_source(options.source)
    rejected, splits, kept = Counter[str](), Counter[str](), 0
    shown = {i * len(source) // options.captions for i in range(options.captions)}
    rows: list[SheetRow] = []
    with progress("reading", len(source), unit="sample") as bar:
        for i in range(len(source)):
            try:
                sample = source[i]
                with decoded(sample.image) as picture:
                    size = "{1} x {0}".format(*picture.shape)
                    thumbnail = Image.fromarray(picture) if i in shown else None
            except Rejected as defect:
                rejected[defect.reason] += 1
            else:
                kept += 1
                splits[sample.meta.get("split", "no split")] += 1
                if thumbnail:
                    thumbnail.thumbnail((256, 256))
                    rows.append(SheetRow(caption=sample.captions[0], pictures=[(thumbnail, size)]))
            bar.advance(1)
    print_counts(options.source, kept, rejected, splits)
    for row in rows:
        print(f"  {row.pictures[0][1]:>11}  {escape_control(row.caption)}")
    if options.output and rows:
        print(f"written: {escape_control(save_png(contact_sheet(rows, columns=4), options.output))}")
