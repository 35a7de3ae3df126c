"""Finetuning on five pictures of a new word, "zog", for a large outlined purple diamond: what is learned and forgotten.

    python bench/forgetting.py zog                                # writes five pictures on four backgrounds
    limner finetune scenes zog --out runs/zog
    python bench/forgetting.py zog --adapter runs/zog/adapter     # draws, and reads the drawings
    python bench/forgetting.py zog --bundle runs/zog              # after --method full or elastic

The scene parser reads single drawings (candidates without a choice) of three groups of captions: a zog on the four
backgrounds that the pictures show, a zog on the fifth, and ordinary captions of the training split. The output has the
shares of right drawings with 95% intervals.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from limner.evaluation.composition import sample_captions
from limner.evaluation.confidence import TEST_SEEDS_FROM, proportion
from limner.evaluation.generate_batches import generate_batches, verdicts
from limner.pipeline import load
from limner.tasks.rendering import render
from limner.tasks.scenes import BACKGROUNDS, EXTENT, UNITS, Scene, SceneObject
from limner.tasks.verify import satisfies

PICTURES, SEEN = 5, list(BACKGROUNDS)[:4]
ZOG = "large outlined purple diamond"


def caption(background: str) -> str:
    """Return the caption of a zog."""
    return f"a zog on a {background} background"


def write_pictures(folder: Path) -> None:
    """Write pictures of zogs at random places, with captions in text files."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    size, fill, color, shape = ZOG.split()
    for i in range(PICTURES):
        background = SEEN[i % len(SEEN)]
        x, y = (int(value) for value in rng.integers(UNITS - EXTENT["large"] + 1, size=2))
        zog = SceneObject(shape=shape, color=color, size=size, fill=fill, x=x, y=y)
        Image.fromarray(render(Scene(objects=(zog,), background=background), 48)).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text(caption(background) + "\n", encoding="utf-8")


def measure(adapter: str | None, bundle: str | None, drawings: int) -> None:
    """Print the shares of right drawings of each group, for `scenes` and for the finetuned model."""
    ordinary = [text for text, _ in sample_captions("train", (1, 2), drawings)]
    groups = {
        "zog, seen backgrounds": [caption(SEEN[i % len(SEEN)]) for i in range(drawings)],
        "zog, new background": [caption(background) for background in BACKGROUNDS if background not in SEEN] * drawings,
        "ordinary captions": ordinary,
    }
    tuned = (bundle, lambda: load(str(bundle))) if bundle else (f"scenes with {adapter}", lambda: load(adapter=adapter))
    for title, load_pipe in (("scenes", load), tuned):
        pipe = load_pipe()
        for name, captions in groups.items():
            right = []
            for part, batch in generate_batches(pipe, captions, 1, TEST_SEEDS_FROM):
                for i, pictures in zip(part, batch.pictures, strict=True):
                    shows = partial(satisfies, caption=captions[i].replace("zog", ZOG))
                    right.append(verdicts(pictures, shows)[0])
            print(f"{title}: {name}: {proportion(np.array(right), [str(i) for i in range(len(right))])}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the five pictures")
    parser.add_argument("--adapter", help="folder of an adapter to measure")
    parser.add_argument("--bundle", help="folder of a finetuned bundle to measure")
    parser.add_argument("--drawings", type=int, default=96, help="drawings of each group")
    options = parser.parse_args()
    if options.adapter or options.bundle:
        measure(options.adapter, options.bundle, options.drawings)
    else:
        write_pictures(options.folder)
        print(f"written: {PICTURES} pictures and their captions in {options.folder}")
