"""Write synthetic scenes to disk as a data set: `limner data scenes OUT --count N --seed S`.

Sample i has a separate generator, seeded by (seed, i): pictures do not depend on the count, and the same command
writes the same bytes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np

from limner.data.image_encode import image_bytes
from limner.data.shard_writer import ShardWriter
from limner.progress import Advance
from limner.tasks.captions import describe, describe_pair
from limner.tasks.rendering import render, render_pair
from limner.tasks.scenes import Split, sample_dense_scene, sample_pair, sample_scene
from limner.validation import SEEDS, InvalidSetting, Range, Validated

__all__ = ["SceneDataSettings", "write_scenes"]

_PHRASINGS = 4


@dataclass(frozen=True, kw_only=True)
class SceneDataSettings(Validated):
    """Settings of a data set of scenes."""

    count: Annotated[int, Range(1, 10**9)] = 20_000
    """Number of pictures."""
    seed: Annotated[int, SEEDS] = 0
    """Seed of the scenes."""
    size: Annotated[int, Range(24, 1_536)] = 48
    """Side of the pictures in pixels, a multiple of 24."""
    kind: Literal["described", "crowded"] = "described"
    """Scenes with captions that describe them, or crowded scenes for training a dVAE, of up to twelve objects."""
    held_out: Annotated[float, Range(0, 1)] = 0.05
    """Share of samples with a held-out combination."""
    pairs: Annotated[float, Range(0, 1)] = 0.1
    """Share of top-and-bottom pairs ("the exact same scene on the top as a sketch at the bottom")."""
    objects: Annotated[tuple[float, float, float, float], Range(0)] = (3, 5, 1, 1)
    """Relative frequencies of described scenes with one, two, three and four objects."""
    in_order: Annotated[float, Range(0, 1)] = 0.0
    """Probability that a caption of two objects must name the upper or left one first; otherwise the order is random. A
    model learns "above" and "below" sooner if one order is rarer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size % 24:
            raise InvalidSetting("size", f"must be a multiple of 24, not {self.size}")
        if not sum(self.objects):
            raise InvalidSetting("objects", "must have at least one frequency above 0")


def write_scenes(
    out: str | os.PathLike[str], settings: SceneDataSettings = SceneDataSettings(), progress: Advance | None = None
) -> dict[str, Any]:
    """Write samples as shards of PNG, captions and ground truth, and return the summary.

    `progress` is called with 1 after every sample.
    """
    probabilities = np.array(settings.objects) / sum(settings.objects)
    with ShardWriter(out) as writer:
        for i in range(settings.count):
            rng = np.random.default_rng((settings.seed, i))
            split: Split = "held-out" if rng.random() < settings.held_out else "train"
            if rng.random() < settings.pairs:
                pair = sample_pair(rng, split=split)
                picture, truth = render_pair(pair, settings.size), {"pair": pair.to_dict()}
                captions = [describe_pair(pair, rng) for _ in range(_PHRASINGS)]
            elif settings.kind == "crowded":
                scene = sample_dense_scene(rng, split=split)
                picture, truth, captions = render(scene, settings.size), {"scene": scene.to_dict()}, ["a crowded scene"]
            else:
                scene = sample_scene(rng, count=1 + int(rng.choice(4, p=probabilities)), split=split)
                picture, truth = render(scene, settings.size), {"scene": scene.to_dict()}
                captions = [describe(scene, rng, settings.in_order) for _ in range(_PHRASINGS)]
            writer.write(image_bytes(picture), tuple(dict.fromkeys(captions)), {**truth, "split": split})
            if progress:
                progress(1)
    return writer.summary()
