"""Write synthetic scenes to disk as a data set: `limner data scenes OUT --count N --seed S`.

Sample i has a separate generator, seeded by (seed, i): pictures do not depend on the count, and the same command
writes the same bytes.
"""

from __future__ import annotations

import os
from typing import Any, Literal

import numpy as np

from limner.data.image_encode import image_bytes
from limner.data.shard_writer import ShardWriter
from limner.progress import Advance
from limner.tasks.captions import describe, describe_pair
from limner.tasks.rendering import render, render_pair
from limner.tasks.scenes import Split, sample_dense_scene, sample_pair, sample_scene

__all__ = ["write_scenes"]

COUNT_WEIGHTS = (3.0, 5.0, 1.0, 1.0)  # relative frequency of one, two, three and four objects
PHRASINGS = 4


def write_scenes(
    out: str | os.PathLike[str],
    count: int,
    seed: int,
    *,
    size: int = 48,
    kind: Literal["described", "crowded"] = "described",
    held_out: float = 0.05,
    pairs: float = 0.1,
    count_weights: tuple[float, float, float, float] = COUNT_WEIGHTS,
    in_order: float = 0.0,
    progress: Advance | None = None,
) -> dict[str, Any]:
    """Write `count` samples as shards of PNG, captions and ground truth, and return the summary.

    Args:
        size: side of the pictures in pixels, a multiple of 12 (24 with pairs).
        kind: "described" scenes have up to four objects and captions that describe them; "crowded" ones have
            up to twelve, to train a dVAE, with the caption "a crowded scene".
        held_out: share of samples with a held-out combination, marked as that split.
        pairs: share of image-to-image pairs, for either kind.
        count_weights: relative frequencies of one, two, three and four objects in described scenes.
        in_order: probability that a relation between two objects names the upper or left one first.
        progress: called with 1 after every sample.
    """
    probabilities = np.array(count_weights) / sum(count_weights)
    with ShardWriter(out) as writer:
        for i in range(count):
            rng = np.random.default_rng((seed, i))
            split: Split = "held-out" if rng.random() < held_out else "train"
            if rng.random() < pairs:
                pair = sample_pair(rng, split=split)
                picture, truth = render_pair(pair, size), {"pair": pair.to_dict()}
                captions = [describe_pair(pair, rng) for _ in range(PHRASINGS)]
            elif kind == "crowded":
                scene = sample_dense_scene(rng, split=split)
                picture, truth, captions = render(scene, size), {"scene": scene.to_dict()}, ["a crowded scene"]
            else:
                scene = sample_scene(rng, count=1 + int(rng.choice(4, p=probabilities)), split=split)
                picture, truth = render(scene, size), {"scene": scene.to_dict()}
                captions = [describe(scene, rng, in_order) for _ in range(PHRASINGS)]
            writer.write(image_bytes(picture), tuple(dict.fromkeys(captions)), {**truth, "split": split})
            if progress:
                progress(1)
    return writer.summary()
