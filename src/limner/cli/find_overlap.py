"""`limner data overlap`: look evaluation pictures up in training data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from limner.cli.arguments import OutputFile, Writable
from limner.cli.evaluate.output import write_file
from limner.progress import progress
from limner.validation import Range, Validated


@dataclass(frozen=True, kw_only=True)
class FindOverlap(Validated):
    """Find evaluation pictures that training has seen, also if they were resized, compressed, cropped, mirrored, turned
    or made brighter.

    Aligned pixels decide, not embeddings: two pictures of the same kind do not overlap.
    """

    data: Positional[str]
    """Data set whose held-out samples are looked up in its training samples."""
    training: Annotated[str | None, arg(metavar="DATA")] = None
    """Another data set to look all samples of the first one up in."""
    threshold: Annotated[float, Range(0, 1)] = 0.85
    """Similarity from which a picture counts as seen; the page shows which value separates."""
    page: Annotated[Path | None, arg(metavar="FILE"), Writable("file")] = None
    """Write an HTML page of the 200 closest pairs."""
    output: OutputFile = None
    """Write the closest training sample of each picture as JSON."""


def overlap(options: FindOverlap) -> None:
    """find evaluation pictures that training has seen"""
    from limner.data.open_source import open_source
    from limner.evaluation.overlap import compare
    from limner.evaluation.report import save_page
    from limner.evaluation.result import save_results

    if options.training is None:
        sources = [open_source(options.data, split=split) for split in ("held-out", "train")]
    else:
        sources = [open_source(options.data), open_source(options.training)]
    with progress("comparing", sum(map(len, sources)), unit="picture") as bar:
        found = compare(sources[0], sources[1], bar.advance)
    result = found.result(options.threshold)
    print(result.table())
    write_file(options.page, lambda path: save_page(path, "overlap", found.page(options.threshold)))
    write_file(options.output, lambda path: save_results(path, [result]))
