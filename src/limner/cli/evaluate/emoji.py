"""`limner evaluate emoji`: the share of drawings whose nearest real emoji is that of the caption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from limner.cli.arguments import check_writable, check_writable_png, parse
from limner.cli.evaluate.shared import Seed, write_result
from limner.errors import UserError, escape_control
from limner.evaluation.confidence import TEST_SEEDS_FROM
from limner.progress import progress
from limner.sampling.generation_config import CANDIDATES
from limner.validation import Range, Validated


@dataclass(frozen=True, kw_only=True)
class ScoreEmoji(Validated):
    """Draw captions of an emoji data set and find the nearest real emoji in the whole set.

    Intervals are 95%, over families: variants of tone, gender, hair and direction count as one family.
    """

    model: Positional[str]
    """A folder that `limner train` wrote."""
    data: Positional[str]
    """A data set of `limner data emoji`."""
    captions: Annotated[int, Range(1, 10**6)] = 256
    """Captions per split, chosen at random."""
    candidates: Annotated[int, CANDIDATES] = 16
    """Candidates per caption, of which the one with the best score counts."""
    repeats: Annotated[int, Range(1, 1_000)] = 4
    """Drawings per caption, each from new candidates: held-out captions are few."""
    seed: Seed = TEST_SEEDS_FROM
    output: Annotated[Path | None, arg(aliases=("-o",))] = None
    """Write all results as JSON."""
    mosaic: Path | None = None
    """Write a PNG of drawings next to real emoji, one file per split."""


def main(argv: Sequence[str]) -> None:
    """is the nearest real picture the right one?"""
    options = parse(ScoreEmoji, argv, "limner evaluate emoji")
    mosaics = [_split_path(options.mosaic, split) for split in ("train", "held-out")] if options.mosaic else []
    for path in filter(None, (options.output, *mosaics)):
        check_writable(path)
    from limner.data.open_source import open_source
    from limner.evaluation import nearest_neighbor as evaluation
    from limner.evaluation.report import save_png
    from limner.pipeline import load

    source = open_source(options.data)
    pipe = load(options.model)
    references = evaluation.ReferenceSet.from_source(source, pipe.dvae.config.size)
    results = []
    for split in ("train", "held-out"):
        total = len(references.split_indices(split, options.captions, options.seed)) * options.repeats
        if total == 0:
            continue
        with progress(f"drawing, {split}", total, unit="drawing") as bar:
            result = evaluation.evaluate(
                pipe, references, split, n=options.captions, candidates=options.candidates, repeats=options.repeats,
                seed=options.seed, progress=bar.advance,
            )  # fmt: skip
        results.append(result)
        print(result.table())
        if options.mosaic:
            path = save_png(evaluation.mosaic(references, result), _split_path(options.mosaic, split))
            print(f"written: {escape_control(path)}")
    if not results:
        raise UserError(f"{options.data} lacks readable pictures: inspect it with `limner data show`")
    write_result(lambda path: evaluation.save(path, references, results), options.output)


def _split_path(path: Path, split: str) -> Path:
    check_writable_png(path)  # a path with a name, which `with_stem` needs
    return path.with_stem(f"{path.stem}-{split}")
