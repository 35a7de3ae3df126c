"""The whole pipeline, from data to pictures, in a few minutes: `limner demo`.

    OUT/data/                generated scenes of one and two objects
    OUT/crowded/             crowded scenes for the dVAE, if the recipe trains one
    OUT/steps.json           training steps that fit the time limit on this machine
    OUT/run/                 the training run, with its bundle
    OUT/composition.json     the score over the held-out captions
    OUT/drawings.safetensors scores and verdicts of all candidates, and those for the captions in the report
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
from html import escape
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from limner.atomic_io import atomic_write_bytes, exclusive_lock
from limner.config import to_dict
from limner.data.shard_writer import is_complete
from limner.errors import UserError
from limner.evaluation import composition, report
from limner.evaluation.result import EvalResult, save_results
from limner.evaluation.scene_sheet import SceneSample, render_samples
from limner.json_files import read_json, read_mapping, to_json, write_json
from limner.pipeline import TextToImage
from limner.progress import clock, progress
from limner.recipes.recipe import STAGE_TITLES, PretrainedDVAE, Recipe, resolve
from limner.runs.parallel_stage import trains_in_parallel
from limner.runs.time_estimate import stage_step_seconds
from limner.runs.train import train_all
from limner.tasks.build_scenes import SceneDataSettings, write_scenes
from limner.tasks.scenes import Scene
from limner.training.metrics_log import read_metrics

_COUNT_WEIGHTS = (0.6, 0.4, 0.0, 0.0)  # shares of scenes with one to four objects
_MAX_TRAINING_SECONDS = 540  # other phases take about 90, and all together at most twelve minutes under load
_TARGET_SECONDS = 5.0  # of a timed batch: enough for a full batch on most machines
_SHORTENED_STAGES = ("prior", "contrastive")
_CHARTED_METRICS = {
    "dvae": ("loss", "eval/psnr"),
    "prior": ("image", "text", "eval/image"),
    "contrastive": ("loss", "eval/accuracy"),
}


def run(
    out: Path, recipe: Recipe, *, scenes: int, captions: int, candidates: int, evaluated: int, seed: int
) -> list[EvalResult]:
    """Run the phases that are not done, write the report, and return the scores.

    Args:
        scenes: number of scenes to train on.
        captions: number of held-out captions in the report.
        candidates: drawings per caption.
        evaluated: number of held-out captions in the score, including those of the report.
        seed: of captions and drawings.
    """
    folder, from_scratch = out / "run", not isinstance(recipe.dvae, PretrainedDVAE)
    with exclusive_lock(out):
        claim_folder(out, {"scenes": scenes, "recipe": to_dict(recipe)})
        if not isinstance(recipe.dvae, PretrainedDVAE) and not (folder / "bundle").exists():
            step_seconds = stage_step_seconds(resolve(recipe), "dvae", False, _TARGET_SECONDS)
            minutes = max(1, round(step_seconds * recipe.dvae.training.steps / 60))
            _say(f"training the dVAE takes about {minutes} minutes on this machine")
        with timed_phase(out, "writing scenes"):
            write_data(out / "data", scenes, "described")
            if from_scratch:
                write_data(out / "crowded", scenes, "crowded")
        with timed_phase(out, "training"):
            recipe = limit_steps(recipe, out)
            if not (folder / "bundle" / "config.json").exists():
                if from_scratch:
                    train_all(recipe, out / "crowded", folder, ("dvae",))
                train_all(recipe, out / "data", folder)
            pipe = TextToImage.from_pretrained(folder)  # the stored weights, which later calls use
        captioned = composition.sample_captions("held-out", (1, 2), max(captions, evaluated), seed)
        with timed_phase(out, "drawing"):
            settings = composition.CompositionSettings(candidates=candidates, best_of=(1,), seed=seed)
            drawings = _draw(out, pipe, captioned, captions, settings)
        scores, right = drawings["scores"].numpy(), drawings["right"].numpy()
        cases = composition.scene_cases(captioned)
        results = composition.composition_results(pipe, cases, right, scores, settings)
        samples = [
            SceneSample(*captioned[i], pictures, scores[i], right[i]) for i, pictures in enumerate(drawings["pictures"])
        ]
        report.save_png(render_samples(samples), out / "contact.png")
        report.save_page(out / "report.html", "limner demo", _page(out, recipe, pipe, scenes, samples, results))
        return results


def limit_steps(recipe: Recipe, out: Path, max_seconds: float = _MAX_TRAINING_SECONDS) -> Recipe:
    """Return the recipe, with fewer steps if training would take more than `max_seconds` on this machine.

    Steps are timed once. Their number is saved in `out/steps.json`, so that a resumed demo uses the same number.
    """
    path = out / "steps.json"
    if not (steps := read_numbers(path)).keys() >= {*_SHORTENED_STAGES}:
        affordable = affordable_steps(recipe, max_seconds)
        steps = {name: min(getattr(recipe, name).training.steps, int(n)) for name, n in affordable.items()}
        write_json(path, steps)
    stages: dict[str, Any] = {}
    for name in _SHORTENED_STAGES:
        stage = getattr(recipe, name)
        count = max(1, min(stage.training.steps, int(steps[name])))
        stages[name] = replace(stage, training=replace(stage.training, steps=count))
    return replace(recipe, **stages)


def affordable_steps(recipe: Recipe, max_seconds: float) -> dict[str, float]:
    """Return the number of steps of each stage that fit `max_seconds`; it may exceed that of the recipe."""
    steps = {name: getattr(recipe, name).training.steps for name in _SHORTENED_STAGES}
    if torch.cuda.is_available():
        return steps
    resolved, in_parallel = resolve(recipe), trains_in_parallel(_SHORTENED_STAGES, torch.device("cpu"))
    seconds = {name: n * stage_step_seconds(resolved, name, in_parallel, _TARGET_SECONDS) for name, n in steps.items()}
    total = max(seconds.values()) if in_parallel else sum(seconds.values())
    if total > max_seconds:
        _say(f"training is shortened to {max_seconds / 60:.0f} of {total / 60:.0f} minutes")
    return {name: n * max_seconds / (seconds[name] if in_parallel else total) for name, n in steps.items()}


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


def write_data(folder: Path, scenes: int, kind: Literal["described", "crowded"]) -> None:
    """Write the scenes to train on, unless they are complete."""
    if not is_complete(folder):
        with progress(f"writing {kind} scenes", scenes, unit="scene") as bar:
            settings = SceneDataSettings(count=scenes, seed=1, kind=kind, pairs=0.0, objects=_COUNT_WEIGHTS)
            write_scenes(folder, settings, bar.advance)


def _draw(
    out: Path,
    pipe: TextToImage,
    captioned: Sequence[tuple[str, Scene]],
    shown: int,
    settings: composition.CompositionSettings,
) -> dict[str, Tensor]:
    """Return "pictures" of the first `shown` captions, uint8 [b, N, 3, H, W], "scores" and "right" of all, [B, N]."""
    path, key = out / "drawings.safetensors", to_json([[caption for caption, _ in captioned], to_dict(settings)])
    if (drawings := load_drawings(path, key)) and len(drawings["pictures"]) >= shown:
        return {**drawings, "pictures": drawings["pictures"][:shown]}
    pictures, scores, right = list[Tensor](), list[Tensor](), list[Tensor]()

    def keep(i: int, drawn: Tensor, score: np.ndarray, verdicts: np.ndarray) -> None:
        pictures.extend([drawn] if i < shown else ())
        scores.append(torch.as_tensor(score))
        right.append(torch.as_tensor(verdicts))

    with progress("drawing", len(captioned) * settings.candidates, unit="picture") as bar:
        cases = composition.scene_cases(captioned)
        results = composition.score(pipe, cases, settings, progress=bar.advance, on_drawn=keep)
    drawings = {"pictures": torch.stack(pictures), "scores": torch.stack(scores), "right": torch.stack(right)}
    atomic_write_bytes(path, save(drawings, {"key": key}))
    save_results(out / "composition.json", results, model=pipe.name)
    return drawings


def load_drawings(path: Path, key: str) -> dict[str, Tensor] | None:
    """Return the saved drawings of the captions and settings in `key`; None if the file is missing or damaged."""
    with suppress(OSError, SafetensorError), safe_open(path, "pt") as file:
        if (file.metadata() or {}).get("key") == key:
            return {name: file.get_tensor(name) for name in ("pictures", "scores", "right")}
    return None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def timed_phase(out: Path, phase: str) -> Iterator[None]:
    """Add the time of a phase to `timings.json`, also if the phase is interrupted."""
    path, start = out / "timings.json", time.monotonic()
    try:
        yield
    finally:
        recorded = read_numbers(path)
        write_json(path, {**recorded, phase: recorded.get(phase, 0.0) + time.monotonic() - start}, indent=2)


def read_numbers(path: Path) -> dict[str, float]:
    """Return the finite numbers of a JSON file by name: none if the file is missing or malformed."""
    with suppress(UserError):
        items = read_mapping(path).items()
        return {name: value for name, value in items if type(value) in (int, float) and math.isfinite(value)}
    return {}


def _page(
    out: Path,
    recipe: Recipe,
    pipe: TextToImage,
    scenes: int,
    samples: Sequence[SceneSample],
    results: Sequence[EvalResult],
) -> str:
    """Return the body of the report: drawings, scores, training curves and times."""
    k = results[0].settings["candidates"]
    names = ("any candidate", "best of 1", f"best of {k}", f"any of {k}")
    scores = [(result.title, *(result.rows[name]["right"] for name in names)) for result in results]
    best, first = (results[0].rows[name]["right"] for name in (f"best of {k}", "best of 1"))
    from_scratch = not isinstance(recipe.dvae, PretrainedDVAE)
    trained = "Three models were" if from_scratch else "A prior and a contrastive model were"
    times = read_numbers(out / "timings.json")
    times["total"] = sum(times.values())
    charts = []
    for stage, keys in _CHARTED_METRICS.items():
        lines = read_metrics(out / "run" / stage / "metrics.jsonl")
        for key in keys:
            points = [(line["step"], line[key]) for line in lines if isinstance(line.get(key), int | float)]
            name = f"{key.removeprefix('eval/')} (held out)" if "/" in key else key
            charts.append(report.chart(f"{STAGE_TITLES[stage]}: {name}", {key: points}))
    size, (rows, columns) = pipe.dvae.config.size, pipe.dvae.config.grid
    settings = [("pictures", f"{size} x {size} pixels, {rows} x {columns} tokens")]
    for name in _SHORTENED_STAGES:
        millions = sum(p.numel() for p in getattr(pipe, name).parameters()) / 1e6
        steps = getattr(recipe, name).training.steps
        settings.append((STAGE_TITLES[name], f"{millions:.2f} M parameters, {steps:,} steps"))
    settings += [
        ("dVAE", "trained here" if from_scratch else "bundled"),
        ("seed", results[0].settings["seed"]),
        ("torch", torch.__version__),
        ("threads", torch.get_num_threads()),
    ]
    return f"""<h1>limner demo</h1>
<p class="lead">{trained} trained here, from random weights, on {scenes:,} pictures of synthetic scenes.
Of {best.total} captions with held-out combinations, the chosen drawing is right for <b>{best.value:.0%}</b>
(best of {k}), compared with {first.value:.0%} for a single drawing.</p>
<h2>Drawings</h2>
<p class="dim">The best of each row was chosen by the contrastive model (blue frame); a scene parser without learned
parts found the right ones (green line).</p>
{"".join(map(_article, samples))}
<h2>Score over {best.total} held-out captions</h2>
{report.table(scores, ("captions", *names))}
<p class="dim">With 95% intervals. Right means: number, size, fill, color and shape of all objects, their relation, and
the background.</p>
<h2>Training</h2>
<div class="charts">{"".join(charts)}</div>
<h2>Time</h2>
{report.table([(phase, clock(seconds)) for phase, seconds in times.items()])}
<h2>Settings</h2>
{report.table(settings)}"""


def _article(sample: SceneSample) -> str:
    """Return the drawing of a caption, the real scene, and all candidates."""
    verdict = '<span class="good">right</span>' if sample.right[sample.best] else '<span class="bad">wrong</span>'
    strip = []
    for i in range(len(sample.pictures)):
        kind = " ".join(name for name, on in (("chosen", i == sample.best), ("right", sample.right[i])) if on)
        title = f"candidate {i + 1}, score {float(sample.scores[i]):.3f}"
        tag = report.img_tag(sample.picture(i), f"candidate {i + 1}", 48)
        strip.append(tag.replace("<img ", f'<img class="{kind}" title="{title}" ', 1))
    best = report.img_tag(sample.picture(sample.best), "best drawing", 192)
    return f"""<article><h3>{escape(sample.caption)}</h3>
<div class="pair"><figure>{best}
<figcaption>drawn: {verdict}, score {float(sample.scores[sample.best]):.3f}</figcaption></figure>
<figure>{report.img_tag(sample.real(), "real scene", 192)}<figcaption>real scene</figcaption></figure></div>
<div class="strip">{"".join(strip)}</div>
<small>{int(sample.right.sum())} of {len(sample.right)} candidates are right</small></article>
"""
