"""Estimates of the training time of a run on this machine, from a few timed steps of each stage.

Weights and batches are random, since speed does not depend on them. Estimates exclude data loading, evaluations and
checkpoints.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from limner.planner.saved_tensors import random_batch
from limner.recipes.recipe import STAGE_TITLES, AnyStage, ResolvedRecipe
from limner.runs.parallel_stage import trains_in_parallel
from limner.training.checkpoint import completed, step_of
from limner.training.step import update
from limner.training.train_state import TrainState

_PARALLEL_SLOWDOWN = 1.25  # slowdown of a step while the other stage trains in parallel
_TARGET_SECONDS = 1.2  # of a timed batch
_MIN_STEPS = 100  # shorter stages are not timed
_MAX_FLOPS = 5e11  # FLOPs per sample, at most, of a timed stage: some seconds on a slow processor
_SECONDS_PER_DAY = 86_400

Batches = Callable[[int], Mapping[str, Tensor]]


def print_estimate(recipe: ResolvedRecipe, out: Path, stages: Sequence[str], fallback: str | None = None) -> None:
    """Print the estimated remaining time of the stages to stderr. Beyond a day, suggest the recipe `fallback` or fewer
    steps. Prints nothing if few steps remain, and raises no exception."""
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            lines = _estimate_lines(recipe, out, stages, fallback)
    except Exception as error:  # if the error affects training, training raises it
        lines = [f"cannot estimate the training time ({type(error).__name__})"]
    if lines:
        print(*lines, sep="\n", file=sys.stderr, flush=True)


def _estimate_lines(recipe: ResolvedRecipe, out: Path, stages: Sequence[str], fallback: str | None) -> list[str]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    in_parallel = {"prior", "contrastive"} if trains_in_parallel(stages, device) else set()
    lines, seconds, incomplete, all_threads_seconds = {}, dict.fromkeys(STAGE_TITLES, 0.0), False, 0.0
    for name, stage in recipe.stages.items():
        title, done = STAGE_TITLES[name], completed(out / name)
        steps = stage.training.steps - (step_of(done[-1]) if done else 0)
        if name not in stages or steps <= _MIN_STEPS:
            continue
        lines[name] = f"  {title}: {steps:,} steps"
        if flops_per_sample(recipe, name) > _MAX_FLOPS:
            lines[name] += ", too large to time"
            incomplete = True
            continue
        seconds[name] = steps * stage_step_seconds(recipe, name, name in in_parallel, _TARGET_SECONDS, device)
        if name in in_parallel and name == "prior":
            all_threads_seconds = steps * stage_step_seconds(recipe, name, False, _TARGET_SECONDS, device)
        if seconds[name] > _SECONDS_PER_DAY:
            scope, total = f"the {title} alone", seconds[name]
            break
    else:
        if in_parallel and (alone := max(0, seconds["prior"] - seconds["contrastive"])):  # with all threads
            seconds["prior"] -= alone * (1 - all_threads_seconds / seconds["prior"])
        combine = max if in_parallel else sum
        scope, total = "training", seconds["dvae"] + combine((seconds["prior"], seconds["contrastive"]))
    if not lines:
        return []
    for name in lines:
        if seconds[name]:
            lines[name] += f", about {_duration(seconds[name])}{' in parallel' * (name in in_parallel)}"
    estimate = f"{'more than' if incomplete else 'about'} {_duration(total)}" if total else "an unknown time"
    summary = f"{scope} takes {estimate}"
    if incomplete or total > _SECONDS_PER_DAY:
        summary += f": {f'--recipe {fallback} is smaller' if fallback else 'reduce the steps'}"
    return ["estimate from a few steps of each stage, at the current load of this machine:", *lines.values(), summary]


def stage_step_seconds(
    recipe: ResolvedRecipe, name: str, in_parallel: bool, target_seconds: float, device: torch.device | str = "cpu"
) -> float:
    """Estimate the seconds of a training step of a stage: with all threads, or `in_parallel` to another stage."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads - threads // 2 if in_parallel else threads)
        seconds = seconds_per_step(*timing_inputs(recipe, name), target_seconds, device)
    finally:
        torch.set_num_threads(threads)
    return seconds * (_PARALLEL_SLOWDOWN if in_parallel else 1)


def _duration(seconds: float) -> str:
    """Format a duration: "40 minutes", "3 hours"."""
    minutes = max(1, round(seconds / 60))
    count, unit = (minutes, "minute") if minutes < 100 else (round(minutes / 60), "hour")
    return f"{count:,} {unit}{'s' * (count > 1)}"


def flops_per_sample(recipe: ResolvedRecipe, name: str) -> float:
    """Estimate the FLOPs of a training step per sample: 6 per parameter and position. The parameters of a dVAE count at
    its grid, where most of them are."""
    config, dvae = recipe.models[name], recipe.models["dvae"]
    with torch.device("meta"):
        parameters = sum(p.numel() for p in config.build().parameters())
    positions = (dvae.size // config.patch) ** 2 if name == "contrastive" else prod(dvae.grid)
    return 6 * parameters * (positions + (0 if name == "dvae" else recipe.recipe.text.length))


def timing_inputs(recipe: ResolvedRecipe, name: str) -> tuple[nn.Module, AnyStage, Batches]:
    """Return the model of a stage, the stage, and a function that generates random batches of a given size."""
    stage, config = recipe.stages[name], recipe.models[name]
    encoder = recipe.models["dvae"].build() if name == "prior" and stage.augment else None

    def batches(n: int) -> Mapping[str, Tensor]:
        batch = random_batch(config, n, distractors=getattr(stage, "distractors", 0))
        return {**batch, "image": encoder.tokenize(random_batch(encoder.config, n)["pixels"])} if encoder else batch

    return config.build(), stage, batches


def seconds_per_step(
    model: nn.Module, stage: AnyStage, batches: Batches, target_seconds: float, device: torch.device | str = "cpu"
) -> float:
    """Estimate the seconds of a training step. Times one sample, then as many (at least two) as take about
    `target_seconds`, and extrapolates linearly to the whole batch."""
    run, size = TrainState(model, stage.objective, stage.training, device), stage.training.batch_size

    def time_update(samples: int) -> float:
        start = time.monotonic()
        update(run, batches(samples))
        return time.monotonic() - start

    def min_seconds(samples: int) -> float:
        """Return the shortest of three timings, since other processes only add time; of one if that is slow."""
        first = time_update(samples)
        return first if first > 1.5 * target_seconds else min(first, time_update(samples), time_update(samples))

    time_update(1)  # warms up
    single = min_seconds(1)
    if size == 1:
        return single
    count = max(2, min(size, int(target_seconds / single)))
    batch_seconds = min_seconds(count)
    return batch_seconds + (size - count) * max(0.0, batch_seconds - single) / (count - 1)
