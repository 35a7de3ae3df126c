"""The whole pipeline, from data to pictures, in a few minutes: `limner demo`.

    OUT/data/                generated scenes of one and two objects
    OUT/crowds/              crowded scenes for the dVAE with --from-scratch
    OUT/steps.json           training steps that fit the time limit on this machine
    OUT/run/                 the training run, with its bundle
    OUT/composition.json     the score over the held-out captions
    OUT/drawings.safetensors all candidates for the captions in the report
    OUT/report.html, OUT/contact.png

Each phase writes its result, a later call skips finished phases, and training resumes from its last checkpoint.
The command may therefore be interrupted and repeated at any time.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from limner.atomic_io import atomic_write_bytes, locked
from limner.config import to_dict
from limner.data.shard_writer import is_complete
from limner.errors import UserError
from limner.evaluation import composition, report
from limner.evaluation.scene_sheet import render_samples, scene_samples
from limner.json_files import read_json, read_mapping, write_json
from limner.pipeline import Candidates, TextToImage
from limner.progress import progress
from limner.recipes.recipe import ContrastiveStage, PretrainedDVAE, PriorStage, Recipe
from limner.runs.demo_options import Demo
from limner.runs.demo_report import page
from limner.runs.time_estimate import COMPANY, seconds_per_step, trial
from limner.runs.train import train_all
from limner.tasks.build_scenes import write_scenes
from limner.tasks.scenes import Scene

THINGS = (0.6, 0.4, 0.0, 0.0)  # shares of scenes with one, two, three and four objects
_TRAINING = 540  # seconds; the other phases take about 90, and the limit for all is twelve minutes on a busy machine
_ROOM = 5.0  # seconds that a timed batch may take: enough for a full batch on most machines


def run(demo: Demo) -> composition.CompositionResult:
    """Run the phases that are not done, write the report, and return the score."""
    with locked(demo.out):
        return _run(demo)


def _run(demo: Demo) -> composition.CompositionResult:
    recipe, out = demo.recipe(), demo.out
    _claim(out, {"scenes": demo.scenes, "recipe": to_dict(recipe)})
    if not isinstance(recipe.dvae, PretrainedDVAE) and not (out / "run" / "bundle").exists():
        minutes = seconds_per_step(*trial(recipe, "dvae"), _ROOM) * recipe.dvae.training.steps / 60
        _say(f"the dVAE alone takes about {max(1, round(minutes))} minutes on this machine")
    with _timed(out, "writing scenes"):
        _write(demo)
    with _timed(out, "training"):
        recipe = paced(recipe, out)
        pipe = _train(demo, recipe)
    asked = composition.sample_captions("held-out", (1, 2), max(demo.captions, demo.evaluated), demo.seed)
    with _timed(out, "drawing"):
        result, pictures = _draw(demo, pipe, asked)
    drawings = scene_samples(asked, pictures, result)
    report.save_png(render_samples(drawings), out / "contact.png")
    took = _numbers(out / "timings.json")
    report.save_page(out / "report.html", "limner demo", page(demo, recipe, pipe, drawings, result, took))
    return result


# ---------------------------------------------------------------------------- phases


def paced(recipe: Recipe, out: Path) -> Recipe:
    """Return the recipe, with fewer steps if training would take more than `_TRAINING` seconds on this machine.

    Steps are timed once. Their number is saved in `out/steps.json`, so that a resumed demo uses the same number.
    """
    path = out / "steps.json"
    if not (steps := _numbers(path)).keys() >= {"prior", "contrastive"}:
        write_json(path, steps := _affordable(recipe))

    def with_steps(stage: Any, name: str) -> Any:
        count = max(1, min(stage.training.steps, int(steps[name])))
        return replace(stage, training=replace(stage.training, steps=count))

    return replace(
        recipe,
        prior=with_steps(recipe.prior, "prior"),
        contrastive=with_steps(recipe.contrastive, "contrastive"),
    )


def _affordable(recipe: Recipe) -> dict[str, int]:
    stages: dict[str, PriorStage | ContrastiveStage] = {"prior": recipe.prior, "contrastive": recipe.contrastive}
    steps = {name: stage.training.steps for name, stage in stages.items()}
    if torch.cuda.is_available():
        return steps
    threads = torch.get_num_threads()
    beside = threads > 1  # each gets half of the threads, and slows the other
    torch.set_num_threads(threads - threads // 2)
    company = COMPANY if beside else 1
    costs = {name: seconds_per_step(*trial(recipe, name), _ROOM) * steps[name] * company for name in stages}
    torch.set_num_threads(threads)
    longest = max(costs.values()) if beside else sum(costs.values())
    if longest > _TRAINING:
        _say(f"training is cut to {_TRAINING / 60:.0f} minutes; all of the recipe would take {longest / 60:.0f} here")
    rooms = {name: _TRAINING if beside else _TRAINING * cost / longest for name, cost in costs.items()}
    return {name: max(1, min(steps[name], int(steps[name] * rooms[name] / costs[name]))) for name in stages}


def _claim(out: Path, settings: dict[str, Any]) -> None:
    """Record the settings in the folder. Raises `UserError` if it holds other files or a demo with other settings."""
    path = out / "demo.json"
    if path.exists():
        if read_json(path) != settings:
            raise UserError(f"{out} holds a demo with other settings: name another folder with --out, or delete it")
    elif any(not entry.name.startswith(".") for entry in out.iterdir()):  # except the lock and a killed run's leftovers
        raise UserError(f"{out} is not empty and holds no demo: name another folder with --out")
    else:
        write_json(path, settings, indent=2)


def _write(demo: Demo) -> None:
    kinds: dict[str, Literal["described", "crowded"]] = {"data": "described"}
    if demo.from_scratch:
        kinds["crowds"] = "crowded"
    for folder, kind in kinds.items():
        if is_complete(demo.out / folder):
            continue
        with progress(f"writing {kind} scenes", demo.scenes, unit="scene") as bar:
            write_scenes(
                demo.out / folder, demo.scenes, seed=1, kind=kind, pairs=0.0, things=THINGS, progress=bar.advance
            )


def _train(demo: Demo, recipe: Recipe) -> TextToImage:
    folder = demo.out / "run"
    if not (folder / "bundle" / "config.json").exists():
        if demo.from_scratch:
            train_all(recipe, demo.out / "crowds", folder, ("dvae",))
        train_all(recipe, demo.out / "data", folder)
    return TextToImage.from_pretrained(folder)  # the stored weights, which later calls use


def _draw(
    demo: Demo, pipe: TextToImage, asked: Sequence[tuple[str, Scene]]
) -> tuple[composition.CompositionResult, Tensor]:
    """Return the scores, and the candidates of the captions to show, uint8 [B, N, 3, H, W]."""
    path, kept = demo.out / "composition.json", demo.out / "drawings.safetensors"
    if path.exists() and (found := _saved(demo, path, [caption for caption, _ in asked])):
        with suppress(FileNotFoundError, SafetensorError, KeyError):
            pictures = load_file(kept)["pictures"]
            if len(pictures) >= demo.captions:
                return found, pictures[: demo.captions]
    shown: list[Tensor] = []

    def keep(start: int, made: Candidates) -> None:
        shown.extend(made.pictures[: max(0, demo.captions - start)])

    settings = composition.CompositionSettings(candidates=demo.candidates, best_of=(1,), seed=demo.seed)
    with progress("drawing", len(asked) * demo.candidates, unit="picture") as bar:
        result = composition.score(pipe, asked, settings, progress=bar.advance, on_candidates=keep)
    pictures = torch.stack(shown)
    atomic_write_bytes(kept, save({"pictures": pictures}))
    result.save(path)
    return result, pictures


def _saved(demo: Demo, path: Path, captions: list[str]) -> composition.CompositionResult | None:
    with suppress(UserError):  # damaged: draw again
        found = composition.CompositionResult.load(path)
        same = found.captions == captions and found.settings["candidates"] == demo.candidates
        return found if same and found.settings.get("seed") == demo.seed else None
    return None


@contextmanager
def _timed(out: Path, phase: str) -> Iterator[None]:
    """Add the time of a phase to `timings.json`, also if the phase is interrupted."""
    path, begun = out / "timings.json", time.monotonic()
    try:
        yield
    finally:
        seconds = time.monotonic() - begun
        known = _numbers(path)
        write_json(path, {**known, phase: known.get(phase, 0.0) + seconds}, indent=2)


def _numbers(path: Path) -> dict[str, Any]:
    """Return the finite numbers of a JSON file by name: none if the file is missing or malformed."""
    found: dict[str, Any] = {}
    with suppress(UserError):
        found = read_mapping(path)
    return {name: value for name, value in found.items() if type(value) in (int, float) and math.isfinite(value)}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
