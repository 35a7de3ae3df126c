"""Entry 1: train the model `glyphs` for a few minutes, and score it on held-out combinations.

    python bench/gpu/glyphs.py --data glyphs.tar --minutes 8 [--from FOLDER]

`--data` is the output of `limner data glyphs`, or a tar archive of it. The number of the prior's steps follows from
their time on this machine, measured first. `$OUT` receives the bundle as `glyphs.zip.00`, `.01`, ... of at most 15 MiB
each, weights in 16 bits, and the results of `limner evaluate glyphs`. With `--from`, training continues from the
weights of an earlier bundle.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import DEVICE, OUT, Results, parser

from limner import recipes
from limner.recipes.recipe import Recipe, resolve
from limner.runs.time_estimate import seconds_per_step, timing_inputs

PART = 15 << 20  # bytes
DVAE_STEPS, CONTRASTIVE_STEPS, BATCH = 2_000, 3_000, 512
CAPTIONS, CANDIDATES, CLASSIFIER_STEPS = 500, 16, 6_000


def main() -> None:
    """Train, pack and score."""
    options = parser(__doc__)
    options.add_argument("--data", type=Path, required=True)
    options.add_argument("--minutes", type=float, default=8.0, help="for the prior")
    given = options.parse_args()
    results = Results("glyphs", given)
    call = 1 + sum(name.startswith("training") for name in results.values)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = given.data
        if data.is_file():
            shutil.unpack_archive(data, folder / "data", filter="data")
            data = next(path.parent for path in (folder / "data").rglob("dataset.json"))
        start = join(given.earlier, folder / "start")
        quick = ["--captions", "2", "--candidates", "2", "--classifier-steps", "2"]
        full = ["--captions", CAPTIONS, "--candidates", CANDIDATES, "--classifier-steps", CLASSIFIER_STEPS]
        results.measure(f"training {call}", lambda: train(given.quick, given.minutes, data, folder, start))
        pack(folder / "bundle")
        scores = ["-o", OUT / "glyphs-scores.json", *(quick if given.quick else full)]
        results.measure(f"scores {call}", lambda: limner("evaluate", "glyphs", folder / "bundle", data, *scores))


def train(quick: bool, minutes: float, data: Path, folder: Path, start: Path | None) -> dict[str, Any]:
    """Train a run and write its bundle. Return the prior's seconds per step and number of steps, and the seconds of the
    whole run."""
    width, depth, batch = (32, 2, 4) if quick else (512, 7, BATCH)  # 27 million parameters: 64 MiB come back
    recipe = recipes.get("glyphs")
    prior = replace(recipe.prior.model, width=width, depth=depth, heads=max(2, width // 64))
    training = replace(recipe.prior.training, batch_size=batch)
    recipe = replace(recipe, prior=replace(recipe.prior, model=prior, training=training))
    step = time_of_step(recipe)
    steps = 2 if quick else max(100, int(60 * minutes / step))
    sizes = {
        "prior.model.width": width, "prior.model.depth": depth, "prior.model.heads": prior.heads,
        "prior.training.batch-size": batch, "prior.training.steps": steps,
        "dvae.training.steps": 2 if quick else DVAE_STEPS,
        "contrastive.training.steps": 2 if quick else CONTRASTIVE_STEPS,
    }  # fmt: skip
    options = [part for key, value in sizes.items() for part in (f"--{key}", str(value))]
    begun = time.perf_counter()
    limner(
        "train", data, "--recipe", "glyphs", "--out", folder / "run", *options, *(["--start", start] if start else [])
    )
    limner("bundle", folder / "run", folder / "bundle", "--name", "glyphs")
    return {"seconds per step": step, "steps": steps, "seconds": time.perf_counter() - begun}


def time_of_step(recipe: Recipe) -> float:
    """Return the seconds of a training step of the prior."""
    return seconds_per_step(
        *timing_inputs(resolve(recipe), "prior"), target_seconds=1.0 if DEVICE.type == "cpu" else 10.0
    )


def limner(*command: object) -> str:
    """Run a command of limner. Return its output; raises `RuntimeError` with the end of its errors."""
    done = subprocess.run([sys.executable, "-m", "limner", *map(str, command)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2_000:])
    return done.stdout


def pack(bundle: Path) -> None:
    """Write a bundle into `$OUT` as parts of a zip file."""
    packed = Path(shutil.make_archive(str(bundle), "zip", bundle)).read_bytes()
    for i, at in enumerate(range(0, len(packed), PART)):
        (OUT / f"glyphs.zip.{i:02d}").write_bytes(packed[at : at + PART])


def join(folder: Path, bundle: Path) -> Path | None:
    """Unpack the bundle in the parts of an earlier call; None without parts."""
    parts = sorted(folder.glob("glyphs.zip.[0-9][0-9]"))
    if not parts:
        return None
    archive = bundle.with_suffix(".zip")
    archive.write_bytes(b"".join(part.read_bytes() for part in parts))
    shutil.unpack_archive(archive, bundle)
    return bundle


if __name__ == "__main__":
    main()
