"""The options of the demo. They need no torch, so that a command line is read before torch is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from limner import recipes
from limner.evaluation.confidence import TEST_SEEDS_FROM
from limner.sampling.generation_config import CANDIDATES
from limner.validation import SEEDS, Checked, Range

if TYPE_CHECKING:
    from limner.recipes.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Demo(Checked):
    """Train a prior and a contrastive model on the built-in scenes, draw held-out captions, write a report.

    It trains for at most nine minutes, so a slow machine takes fewer steps. Ctrl-C stops it; the same command goes on.
    """

    out: Path = Path("limner-demo")
    """Folder for data, models and report."""
    from_scratch: bool = False
    """Train the dVAE as well instead of taking the bundled one; it says beforehand how long that takes."""
    scenes: Annotated[int, Range(1, 10**8)] = 12_000
    """Scenes to train on."""
    captions: Annotated[int, Range(1, 10**4)] = 8
    """Held-out captions to show; their scenes have one and two things in turn."""
    candidates: Annotated[int, CANDIDATES] = 32
    """Drawings of each caption to choose from."""
    evaluated: Annotated[int, Range(1, 10**6)] = 64
    """Held-out captions that the score is taken over, those shown among them."""
    seed: Annotated[int, SEEDS] = TEST_SEEDS_FROM
    """Of the captions and drawings."""

    def recipe(self) -> Recipe:
        recipe = recipes.get("demo")
        return replace(recipe, dvae=recipes.get("scenes").dvae) if self.from_scratch else recipe
