"""The whole pipeline, from data to pictures, in a few minutes: `limner demo`.

    OUT/data/                generated scenes of one and two objects
    OUT/crowded/             crowded scenes for the dVAE with --from-scratch
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

from limner.atomic_io import atomic_write_bytes, exclusive_lock
from limner.config import to_dict
from limner.data.shard_writer import is_complete
from limner.errors import UserError
from limner.evaluation import composition, report
from limner.evaluation.scene_sheet import render_samples, scene_samples
from limner.json_files import read_json, read_mapping, write_json
from limner.pipeline import Candidates, TextToImage
from limner.progress import progress
from limner.recipes.recipe import ContrastiveStage, PretrainedDVAE, PriorStage, Recipe, resolve
from limner.runs.demo_options import Demo
from limner.runs.demo_report import page
from limner.runs.time_estimate import PARALLEL_SLOWDOWN, seconds_per_step, timing_inputs
from limner.runs.train import train_all
from limner.tasks.build_scenes import write_scenes
from limner.tasks.scenes import Scene

COUNT_WEIGHTS = (0.6, 0.4, 0.0, 0.0)  # shares of scenes with one to four objects
_MAX_TRAINING_SECONDS = 540  # other phases take about 90, and all together at most twelve minutes under load
_TARGET_SECONDS = 5.0  # of a timed batch: enough for a full batch on most machines


def run(demo: Demo) -> composition.CompositionResult:
    """Run the phases that are not done, write the report, and return the score."""
    with exclusive_lock(demo.out):
        return _run(demo)


def _run(demo: Demo) -> composition.CompositionResult:
    recipe, out = demo.recipe(), demo.out
    claim_folder(out, {"scenes": demo.scenes, "recipe": to_dict(recipe)})
    if not isinstance(recipe.dvae, PretrainedDVAE) and not (out / "run" / "bundle").exists():
        minutes = (
            seconds_per_step(*timing_inputs(resolve(recipe), "dvae"), _TARGET_SECONDS) * recipe.dvae.training.steps / 60
        )
        _print(f"training the dVAE takes about {max(1, round(minutes))} minutes on this machine")
    with timed_phase(out, "writing scenes"):
        write_data(demo)
    with timed_phase(out, "training"):
        recipe = limit_steps(recipe, out)
        pipe = _train(demo, recipe)
    captioned = composition.sample_captions("held-out", (1, 2), max(demo.captions, demo.evaluated), demo.seed)
    with timed_phase(out, "drawing"):
        result, pictures = _draw(demo, pipe, captioned)
    samples = scene_samples(captioned, pictures, result)
    report.save_png(render_samples(samples), out / "contact.png")
    timings = read_numbers(out / "timings.json")
    report.save_page(out / "report.html", "limner demo", page(demo, recipe, pipe, samples, result, timings))
    return result


# ---------------------------------------------------------------------------- phases


def limit_steps(recipe: Recipe, out: Path, max_seconds: float = _MAX_TRAINING_SECONDS) -> Recipe:
    """Return the recipe, with fewer steps if training would take more than `max_seconds` on this machine.

    Steps are timed once. Their number is saved in `out/steps.json`, so that a resumed demo uses the same number.
    """
    path = out / "steps.json"
    if not (steps := read_numbers(path)).keys() >= {"prior", "contrastive"}:
        write_json(path, steps := affordable_steps(recipe, max_seconds))

    def with_steps(stage: Any, name: str) -> Any:
        count = max(1, min(stage.training.steps, int(steps[name])))
        return replace(stage, training=replace(stage.training, steps=count))

    prior, contrastive = with_steps(recipe.prior, "prior"), with_steps(recipe.contrastive, "contrastive")
    return replace(recipe, prior=prior, contrastive=contrastive)


def affordable_steps(recipe: Recipe, max_seconds: float) -> dict[str, int]:
    """Return the number of steps of each stage that fit `max_seconds`, at most those of the recipe."""
    stages: dict[str, PriorStage | ContrastiveStage] = {"prior": recipe.prior, "contrastive": recipe.contrastive}
    steps = {name: stage.training.steps for name, stage in stages.items()}
    if torch.cuda.is_available():
        return steps
    threads = torch.get_num_threads()
    in_parallel = threads > 1  # with half of the threads each, which slows both
    torch.set_num_threads(threads - threads // 2)
    resolved = resolve(recipe)
    step_seconds = {name: seconds_per_step(*timing_inputs(resolved, name), _TARGET_SECONDS) for name in stages}
    torch.set_num_threads(threads)
    slowdown = PARALLEL_SLOWDOWN if in_parallel else 1
    seconds = {name: step_seconds[name] * steps[name] * slowdown for name in stages}
    total = max(seconds.values()) if in_parallel else sum(seconds.values())
    if total > max_seconds:
        _print(f"training is shortened to {max_seconds / 60:.0f} of {total / 60:.0f} minutes")
    available = {name: max_seconds if in_parallel else max_seconds * seconds[name] / total for name in stages}
    return {name: max(1, min(steps[name], int(steps[name] * available[name] / seconds[name]))) for name in stages}


def claim_folder(out: Path, settings: dict[str, Any]) -> None:
    """Record the settings in the folder. Raises `UserError` if it holds other files or a demo with other settings."""
    path = out / "demo.json"
    if path.exists():
        if read_json(path) != settings:
            raise UserError(
                f"{out} contains a demo with other settings: delete it, or choose another folder with --out"
            )
    elif any(not entry.name.startswith(".") for entry in out.iterdir()):  # except the lock and a killed run's leftovers
        raise UserError(f"{out} contains files and no demo: choose an empty folder with --out")
    else:
        write_json(path, settings, indent=2)


def write_data(demo: Demo) -> None:
    """Write the scenes to train on, unless they are complete."""
    kinds: dict[str, Literal["described", "crowded"]] = {"data": "described"}
    if demo.from_scratch:
        kinds["crowded"] = "crowded"
    for folder, kind in kinds.items():
        if is_complete(demo.out / folder):
            continue
        with progress(f"writing {kind} scenes", demo.scenes, unit="scene") as bar:
            write_scenes(
                demo.out / folder,
                demo.scenes,
                seed=1,
                kind=kind,
                pairs=0.0,
                count_weights=COUNT_WEIGHTS,
                progress=bar.advance,
            )


def _train(demo: Demo, recipe: Recipe) -> TextToImage:
    folder = demo.out / "run"
    if not (folder / "bundle" / "config.json").exists():
        if demo.from_scratch:
            train_all(recipe, demo.out / "crowded", folder, ("dvae",))
        train_all(recipe, demo.out / "data", folder)
    return TextToImage.from_pretrained(folder)  # the stored weights, which later calls use


def _draw(
    demo: Demo, pipe: TextToImage, captioned: Sequence[tuple[str, Scene]]
) -> tuple[composition.CompositionResult, Tensor]:
    """Return the scores, and the candidates of the captions to show, uint8 [B, N, 3, H, W]."""
    path, drawings_file = demo.out / "composition.json", demo.out / "drawings.safetensors"
    if path.exists() and (saved := load_result(demo, path, [caption for caption, _ in captioned])):
        with suppress(FileNotFoundError, SafetensorError, KeyError):
            pictures = load_file(drawings_file)["pictures"]
            if len(pictures) >= demo.captions:
                return saved, pictures[: demo.captions]
    first_pictures: list[Tensor] = []

    def keep_first(start: int, candidates: Candidates) -> None:
        first_pictures.extend(candidates.pictures[: max(0, demo.captions - start)])

    settings = composition.CompositionSettings(candidates=demo.candidates, best_of=(1,), seed=demo.seed)
    with progress("drawing", len(captioned) * demo.candidates, unit="picture") as bar:
        result = composition.score(pipe, captioned, settings, progress=bar.advance, on_candidates=keep_first)
    pictures = torch.stack(first_pictures)
    atomic_write_bytes(drawings_file, save({"pictures": pictures}))
    result.save(path)
    return result, pictures


def load_result(demo: Demo, path: Path, captions: list[str]) -> composition.CompositionResult | None:
    """Return the saved result if it has the same captions and settings, else None."""
    with suppress(UserError):  # damaged: draw again
        result = composition.CompositionResult.load(path)
        settings = result.settings["candidates"], result.settings["seed"]
        return result if result.captions == captions and settings == (demo.candidates, demo.seed) else None
    return None


@contextmanager
def timed_phase(out: Path, phase: str) -> Iterator[None]:
    """Add the time of a phase to `timings.json`, also if the phase is interrupted."""
    path, start = out / "timings.json", time.monotonic()
    try:
        yield
    finally:
        seconds = time.monotonic() - start
        recorded = read_numbers(path)
        write_json(path, {**recorded, phase: recorded.get(phase, 0.0) + seconds}, indent=2)


def read_numbers(path: Path) -> dict[str, Any]:
    """Return the finite numbers of a JSON file by name: none if the file is missing or malformed."""
    values: dict[str, Any] = {}
    with suppress(UserError):
        values = read_mapping(path)
    return {name: value for name, value in values.items() if type(value) in (int, float) and math.isfinite(value)}


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
