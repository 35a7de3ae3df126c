"""`limner evaluate reconstruction`: reconstruction quality of a dVAE on unseen pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from limner.cli.arguments import check_writable, parse
from limner.cli.evaluate.shared import SEED_RANGES, require_scenes, write_result
from limner.errors import UserError, escape_control
from limner.evaluation.confidence import TEST_SEEDS_FROM
from limner.progress import progress
from limner.validation import SEEDS, Range, Validated


@dataclass(frozen=True, kw_only=True)
class ScoreReconstruction(Validated):
    """Reconstruct unseen pictures with a model's dVAE: PSNR, codes in use, and the accuracy of a scene parser."""

    model: Positional[str] = "scenes"
    """Name of a bundled model, or a folder."""
    data: Annotated[str | None, arg(metavar="DATA")] = None
    """A data set with held-out samples; by default new scenes, which a scene parser also checks."""
    split: Literal["both", "train", "held-out"] = "both"
    """Split of the combinations in new scenes."""
    count: Annotated[int, Range(1, 10**6)] = 1024
    """Maximum number of pictures."""
    seed: Annotated[int, SEEDS, arg(help=f"Seed of the new scenes. {SEED_RANGES}")] = TEST_SEEDS_FROM
    output: Annotated[Path | None, arg(aliases=("-o",))] = None
    """Write the result as JSON."""


def main(argv: Sequence[str]) -> None:
    """how well does the dVAE reconstruct unseen pictures?"""
    options = parse(ScoreReconstruction, argv, "limner evaluate reconstruction")
    if options.output:
        check_writable(options.output)
    from limner.evaluation import reconstruction as evaluation
    from limner.pipeline import load

    pipe = load(options.model)
    size = pipe.dvae.config.size
    if options.data is None:
        require_scenes(size, "add --data")
        pictures = evaluation.fresh_scenes(
            options.count, options.seed, None if options.split == "both" else options.split, size
        )
    else:
        import numpy as np

        from limner.data.datasets import ImageCaptionDataset
        from limner.data.open_source import open_source

        source = open_source(options.data, split="held-out")
        indices = np.linspace(0, len(source) - 1, min(len(source), options.count)).astype(int)
        pictures = ImageCaptionDataset(source, size).load(indices)[1]
        if not len(pictures):
            raise UserError(f"{options.data} lacks readable held-out pictures: inspect it with `limner data show`")
    with progress("reconstructing", len(pictures), unit="picture") as bar:
        result = evaluation.measure(pipe.dvae, pictures, check_scenes=options.data is None, progress=bar.advance)
    print(f"{escape_control(pipe.name)}\n{result.table()}")
    write_result(result.save, options.output)
