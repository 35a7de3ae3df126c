"""`limner evaluate zero-shot`: zero-shot classification by a contrastive model, from class names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from limner.cli.arguments import check_writable, parse
from limner.cli.evaluate.shared import SEED_RANGES, require_scenes, write_result
from limner.errors import escape_control
from limner.evaluation.confidence import TEST_SEEDS_FROM
from limner.progress import progress
from limner.validation import SEEDS, Range, Validated


@dataclass(frozen=True, kw_only=True)
class ScoreZeroShot(Validated):
    """Classify pictures with a model's contrastive model, from the names of the classes alone."""

    model: Positional[str] = "scenes"
    """Name of a bundled model, or a folder; also that of a run that has trained only a contrastive model."""
    data: Annotated[str | None, arg(metavar="DATA")] = None
    """A data set of `limner data emoji`, whose names are the classes; by default new scenes of one object."""
    split: Literal["train", "held-out"] = "held-out"
    """Pictures of the training split, or with combinations held out of training."""
    count: Annotated[int, Range(1, 10**6)] = 1_024
    """Maximum number of pictures."""
    seed: Annotated[int, SEEDS, arg(help=f"Seed of the pictures. {SEED_RANGES}")] = TEST_SEEDS_FROM
    output: Annotated[Path | None, arg(aliases=("-o",))] = None
    """Write the result as JSON."""


def main(argv: Sequence[str]) -> None:
    """does the contrastive model recognize classes by name?"""
    options = parse(ScoreZeroShot, argv, "limner evaluate zero-shot")
    if options.output:
        check_writable(options.output)
    from limner.data.open_source import open_source
    from limner.evaluation import zero_shot as evaluation
    from limner.runs.stages import load_reranker

    model, tokenizer, name = load_reranker(options.model)
    size = model.config.size
    if options.data is None:
        require_scenes(size, "add --data")
        task = evaluation.scene_task(options.count, size, options.split, options.seed)
    else:
        task = evaluation.dataset_task(open_source(options.data), size, options.split, options.count, options.seed)
    total = len(task.names) * len(task.prompts) + len(task.labels)
    with progress("classifying prompts and pictures", total, unit="text or picture") as bar:
        result = evaluation.evaluate(model, tokenizer, task, bar.advance)
    print(f"{escape_control(name)}, {options.split}\n{result.table()}")
    write_result(lambda path: result.save(path, name), options.output)
