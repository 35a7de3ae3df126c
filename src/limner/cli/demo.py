"""`limner demo`: train on synthetic scenes, draw, and write a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from limner import recipes
from limner.cli.arguments import NewFolder, parse
from limner.errors import escape_control
from limner.evaluation.confidence import TEST_SEEDS_FROM
from limner.sampling.generation_config import CANDIDATES
from limner.validation import SEEDS, Range, Validated

if TYPE_CHECKING:
    from limner.recipes.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Demo(Validated):
    """Train a prior and a contrastive model on the built-in scenes, draw held-out captions, write a report.

    Training takes at most nine minutes: a slow machine takes fewer steps. After Ctrl-C the same command resumes.
    """

    out: Annotated[NewFolder, arg(metavar="FOLDER")] = Path("limner-demo")
    """Folder for data, models and report."""
    from_scratch: bool = False
    """Train the dVAE instead of using the bundled one; prints a time estimate first."""
    scenes: Annotated[int, Range(1, 10**8)] = 12_000
    """Scenes to train on."""
    captions: Annotated[int, Range(1, 10**4)] = 8
    """Held-out captions to show; scenes alternate between one and two objects."""
    candidates: Annotated[int, CANDIDATES] = 32
    """Drawings per caption to choose from."""
    evaluated: Annotated[int, Range(1, 10**6)] = 64
    """Held-out captions to score, including those shown."""
    seed: Annotated[int, SEEDS] = TEST_SEEDS_FROM
    """Seed of captions and drawings."""

    def recipe(self) -> Recipe:
        recipe = recipes.get("demo")
        return replace(recipe, dvae=recipes.get("scenes").dvae) if self.from_scratch else recipe


def main(argv: Sequence[str]) -> None:
    """Run the demo and print its results and output files."""
    options = parse(Demo, argv, "limner demo")
    from limner.evaluation.result import tables
    from limner.runs import demo

    results = demo.run(
        options.out, options.recipe(), scenes=options.scenes, captions=options.captions,
        candidates=options.candidates, evaluated=options.evaluated, seed=options.seed,
    )  # fmt: skip
    out = Path(escape_control(options.out))
    print(tables(results))
    print(f"report:        {out / 'report.html'}")
    print(f"contact sheet: {out / 'contact.png'}")
    print(f'draw more:     limner draw "a large green cross on a pink background" --model {out / "run"}')
